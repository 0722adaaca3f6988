"""Cascades of Imagen's UNets that enlarge letters and pictograms."""
