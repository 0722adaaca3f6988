"""Stable Diffusion XL's form end to end: pictures are prepared, a tiny UNet is trained on them and drawn from."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration import actions
from tests.integration.runs import overrides
from tests.support.encoders import CLIP_WIDTH, PROJECTION, prepare_sdxl
from tests.support.ranks import Job, run_jobs

pytestmark = pytest.mark.slow


def test_prepared_pictures_train_a_model_that_is_asked_for_sizes_and_crops(tmp_path: Path):
    """Offset noise and v from a table that ends at pure noise; the crop that is asked for changes the picture."""
    folder, run = prepare_sdxl(tmp_path), tmp_path / "run"
    settings = {"data": "energon", "data__path": folder / "joined", "data__num_streams": 1, "data__background": False}
    settings |= {"data__bucket_by_shape": True, "model__context_size": 2 * CLIP_WIDTH, "model__pooled_size": PROJECTION}
    settings |= {"objective__prediction": "v", "objective__zero_terminal_snr": True, "objective__noise_offset": 0.05}
    settings |= {
        "training__num_steps": 3,
        "optimizer__lr": 0.03,
        "schedule__warmup_steps": 0,
        "training__global_batch_size": 4,
        "training__sample_interval": 3,
    }
    settings |= {"sampling__prompts": '["a red circle"]', "sampling__num_steps": 2, "logging__tensorboard": False}
    words = ["--yes", "--factory", "tiny_sdxl_unet", *overrides(run, **settings)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a red circle", "crop": [0, 8]}\n{"prompt": "a red circle"}\n')
    common = [
        "--checkpoint",
        str(run),
        "--raw-weights",
        "--seed",
        "1",
        "--out",
        str(tmp_path / "x.png"),
        "--save-latents",
    ]
    files = [tmp_path / f"{name}.safetensors" for name in ("plain", "cut", "asked")]
    asked = [["--prompt", "a red circle"], ["--prompt", "a red circle", "--crop", "0,8"], ["--prompts", str(prompts)]]
    jobs = {"train": Job(actions.train, {"arguments": words})}
    jobs |= {f.stem: Job(actions.draw, {"arguments": [*common, str(f), *flags]}) for f, flags in zip(files, asked)}
    ended = run_jobs(tmp_path / "jobs", jobs)
    assert [end.code for end in ended.values()] == [0, 0, 0, 0], [end.err for end in ended.values()]
    assert list((run / "samples").glob("step_*/*.png"))
    plain, cut, both = (next(x for x in load_file(f).values() if x.dim() == 5) for f in files)
    assert (plain - cut).abs().max() > 1e-4
    torch.testing.assert_close(both[:1], cut, rtol=0, atol=1e-5)  # of another batch
