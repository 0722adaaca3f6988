"""Muon's work on an average rank; a trace has one rank, and assumes that the others have the same parts of weights.

Ranks with parts of a weight orthogonalise it once. Of the products and the exchange, a rank counts its share:

    parts of the weight     products          sent to the owner       returned to the others
    one rank has all        1                 0                       0
    n ranks have all        1 / n             0                       (n - 1) / n
    n ranks have 1 / n      1 / n             (n - 1) / n of 1 / n    (n - 1) / n of 1 / n
"""

from collections import defaultdict
from collections.abc import Sequence

import torch

from dit.backends.process_groups import ProcessGroups
from dit.backends.sharding import Matrices
from dit.optimizer.master_weights import MasterShard, copy_of, part_of
from dit.optimizer.muon import Muon, direction
from dit.tracing.counter import Product, StepCounter, StepTrace


def average(step: StepTrace, muon: Muon, shards: Sequence[MasterShard], groups: ProcessGroups) -> None:
    """Replace the products and exchanged bytes of the update; call it in the fake tensor mode of the trace."""
    products, elements = defaultdict[Product, float](float), 0.0
    of_shape: dict[tuple[tuple[int, ...], Matrices], dict[Product, float]] = {}
    for shard in shards:
        if shard.matrices is None or shard.start == shard.stop:
            continue
        part, copies = part_of(shard.parameter, groups, shard.start, shard.stop), copy_of(shard, groups)[1]
        kind = part.shape, shard.matrices
        if kind not in of_shape:
            with StepCounter() as counter:
                direction(torch.empty(part.shape, dtype=muon.dtype), shard.matrices)
            of_shape[kind] = counter.trace.products
        share = part.size / torch.Size(part.shape).numel()
        for product, count in of_shape[kind].items():
            products[product] += count * share / copies
        elements += part.size * ((1 - share) / copies + 1 - share / copies)
    update = step.parts["update"]
    for product in update.products.keys() | products.keys():
        step.products[product] = step.products.get(product, 0) - update.products.get(product, 0) + products[product]
    update.products = dict(products)
    for key in [key for key in update.sent_bytes if key[0] == "all_to_all"]:
        step.sent_bytes[key] += round(elements * muon.dtype.itemsize) - update.sent_bytes[key]
        update.sent_bytes[key] = round(elements * muon.dtype.itemsize)
