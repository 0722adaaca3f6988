"""Runs to measure and to compare: the rows of NeMo's published table, of its parallel matrix, and of its stages.

All feed synthetic latents. Time one with `torchrun --standalone --nproc-per-node N -m benchmarks.step --factory NAME`,
which reports TFLOPS in three labelled conventions, tokens/s per GPU and peak memory. NeMo's figures were published for
32 nodes of 8 H100 and never with a batch size; a batch of 256 is assumed where a layout needs one.
"""

import nemo_run as run

from dit.objectives.flow_matching import FlowMatching
from dit.optimizer.schedules import Constant
from dit.parallel.dims import ParallelConfig
from dit.settings import CheckpointConfig, LoggingConfig, SamplingConfig, TrainingConfig
from dit.training.pretrain import pretrain
from energon_data.mock import MockData
from recipes import moviegen
from recipes.base import registered, variant
from recipes.components import adamw_large
from recipes.dit import as_large_model, as_mock, on_tensor_parallel, text_conditional, with_fsdp
from recipes.models import dit_cross_7b, dit_cross_28b, dit_s, moviegen_5b, moviegen_30b

IMAGE_256 = (1, 32, 32)
"""Latent (frames, height, width) of 256 tokens."""
CLIP_8K = (32, 32, 32)
"""Latent (frames, height, width) of 8192 tokens."""
CLIP_64K = (16, 128, 128)
"""Latent of 65,536 tokens."""
CLIP_74K = (32, 96, 96)
"""Latent of 73,728 tokens."""


@registered
def mock_dit7b_8k() -> run.Partial:
    """DiT-7B with text (7.19 B) on synthetic clips of 8192 tokens, TP 2 + SP and FSDP, 15 steps: 8 x 80 GB or more.

    For measurements; steps 10 and 11 are traced into `profile/`. NeMo publishes 10,052 tokens/s per H100 for this model
    and length, which its convention calls 519 TFLOPS; the necessary work is 359.
    """
    recipe = as_large_model(text_conditional(dit_cross_7b()))
    recipe.logging.profile_steps = [10, 11]
    return with_fsdp(on_tensor_parallel(as_mock(recipe, CLIP_8K), 2))


@registered
def train_mock() -> run.Partial:
    """MovieGen-5B cut to 16 layers (2.88 B) on synthetic clips of 73,728 tokens, TP 4 + SP, CP 2, FSDP: 8 x 80 GB.

    For measurements of long sequences on one node; one sample per step. NeMo's recipe of this name has 73,728
    tokens and gets one frame; this one really has them.
    """
    recipe = as_mock(as_large_model(text_conditional(moviegen_5b())), CLIP_74K)
    recipe.model.num_layers = 16
    recipe.training.global_batch_size = 1
    recipe.parallel.context_parallel_size = 2
    return with_fsdp(on_tensor_parallel(recipe, 4))


@registered
def mock_ditllama5b_8k() -> run.Partial:
    """MovieGen-5B (5.74 B) on synthetic clips of 8192 tokens, TP 2 + SP and FSDP, 15 steps: 8 x 80 GB.

    For measurements: the counterpart of mock_dit7b_8k, with a trace of steps 10 and 11, too.
    """
    recipe = as_mock(as_large_model(text_conditional(moviegen_5b())), CLIP_8K)
    recipe.logging.profile_steps = [10, 11]
    return with_fsdp(on_tensor_parallel(recipe, 2))


@registered
def pretrain_ditllama5b_stage3_mock_with_pp() -> run.Partial:
    """MovieGen-5B (5.74 B) on synthetic clips of 8192 tokens, TP 2 + SP, PP 2, CP 2: 8 GPUs, a check of the layout.

    One sample per step, so half of each pipeline waits: raise `training.global_batch_size` to measure anything.
    """
    recipe = as_large_model(text_conditional(moviegen_5b()))
    recipe = on_tensor_parallel(as_mock(recipe, CLIP_8K), 2)
    recipe.training.global_batch_size = 1
    recipe.parallel.pipeline_model_parallel_size = 2
    recipe.parallel.context_parallel_size = 2
    return recipe


def _mock_30b(latent: tuple[int, int, int], tensor_size: int, context_size: int) -> run.Partial:
    recipe = as_mock(as_large_model(text_conditional(moviegen_30b())), latent)
    recipe.training.global_batch_size = 256
    recipe.parallel.context_parallel_size = context_size
    return on_tensor_parallel(recipe, tensor_size)


@registered
def pretrain_ditllama30b_stage2_mock() -> run.Partial:
    """MovieGen-30B (33.4 B) on synthetic clips of 8192 tokens, TP 2 + SP, CP 4, FSDP: 64 x 80 GB, 32 GiB each.

    The layout of stage 2, 256 clips per step; every GPU has 2048 tokens of a clip.
    """
    return with_fsdp(_mock_30b(CLIP_8K, 2, 4))


@registered
def pretrain_ditllama30b_stage3_mock() -> run.Partial:
    """MovieGen-30B (33.4 B) on synthetic clips of 73,728 tokens, TP 2 + SP, CP 8, FSDP, 256 per step: 128 x 80 GB.

    The layout of stage 3; every GPU works on 9216 tokens of a clip. NeMo's recipe requests them and gets one frame.
    Cheap activations are recomputed; --dryrun estimates 59 GiB on each of 128 GPUs, 16 with `training.recompute=full`.
    """
    recipe = with_fsdp(_mock_30b(CLIP_74K, 2, 8))
    recipe.training.recompute = "selective"
    return recipe


@registered
def pretrain_ditllama30b_stage3_mock_with_pp() -> run.Partial:
    """MovieGen-30B (33.4 B) on synthetic clips of 73,728 tokens, TP 4 + SP, PP 4, CP 8, 256 per step: 128 x 80 GB.

    Each GPU has a quarter of 12 layers and, per micro-batch, an eighth of a clip's tokens.
    """
    recipe = _mock_30b(CLIP_74K, 4, 8)
    recipe.parallel.pipeline_model_parallel_size = 4
    return recipe


def _measured(model: run.Config, latent: tuple[int, int, int]) -> run.Partial:
    recipe = as_mock(as_large_model(text_conditional(model)), latent)
    recipe.training.global_batch_size = 256
    return recipe


@registered
def bench_dit7b_8k_baseline() -> run.Partial:
    """DiT-7B (7.19 B) at 8192 tokens on plain data parallelism, nothing recomputed: does not fit into 80 GB.

    NeMo's table has "OOM" in this row: weights, gradients and Adam's states take 18 bytes per parameter, 120 GiB.
    """
    recipe = _measured(dit_cross_7b(), CLIP_8K)
    recipe.parallel = run.Config(ParallelConfig, data_parallel="ddp", overlap_grad_reduce=True)
    return recipe


@registered
def bench_dit7b_8k_tp2sp() -> run.Partial:
    """DiT-7B (7.19 B) at 8192 tokens, TP 2 + SP: 16 x 80 GB or more.

    Published: 10,052 tokens/s per GPU, 519 TFLOPS in NeMo's convention, which is 359 TFLOPS of necessary work.
    """
    return on_tensor_parallel(_measured(dit_cross_7b(), CLIP_8K), 2)


@registered
def bench_dit7b_74k_tp2sp_cp4() -> run.Partial:
    """DiT-7B (7.19 B) at 73,728 tokens, TP 2 + SP, CP 4: 16 x 141 GB or more, 75 GiB each.

    Published: 3409 tokens/s per GPU, 439 TFLOPS in NeMo's convention, 385 of work.
    `training.recompute=selective` takes it to 67 GiB on each of 16 GPUs.
    """
    recipe = on_tensor_parallel(_measured(dit_cross_7b(), CLIP_74K), 2)
    recipe.parallel.context_parallel_size = 4
    return recipe


@registered
def bench_dit28b_8k_tp4pp4() -> run.Partial:
    """DiT-28B (28.3 B) at 8192 tokens, TP 4 + SP, PP 4: 32 x 80 GB or more.

    Published: 2510 tokens/s per GPU, 468 TFLOPS in NeMo's convention, 307 of work.
    """
    recipe = on_tensor_parallel(_measured(dit_cross_28b(), CLIP_8K), 4)
    recipe.parallel.pipeline_model_parallel_size = 4
    return recipe


@registered
def bench_dit28b_64k_fsdp_ckpt() -> run.Partial:
    """DiT-28B (28.3 B) at 65,536 tokens, FSDP, every layer recomputed: 64 x 80 GB or more, 68 GiB each.

    Published: 1386 tokens/s per GPU, 445 TFLOPS in NeMo's convention, 357 of work.
    """
    recipe = with_fsdp(_measured(dit_cross_28b(), CLIP_64K))
    recipe.training.recompute = "full"
    return recipe


def _on_one_gpu(num_layers: int, latent: tuple[int, int, int]) -> run.Partial:
    """Return layers of DiT-7B that fit one GPU: two sizes give the time of a layer, and of the ends."""
    recipe = _measured(dit_cross_7b(), latent)
    recipe.model.num_layers = num_layers
    recipe.training.global_batch_size = 1
    recipe.parallel = run.Config(ParallelConfig, data_parallel="ddp")
    return recipe


bench_dit7b_8k_1gpu_l4 = variant("bench_dit7b_8k_1gpu_L4", lambda: _on_one_gpu(4, CLIP_8K))
"""4 layers of DiT-7B (933 M) at 8192 tokens on one GPU: with bench_dit7b_8k_1gpu_L8, the time of a layer.

A GPU of 80 GB. The time of bench_dit7b_8k_1gpu_L8 minus this one's is that of four layers; NeMo's published figure
for the full model on 256 GPUs is 359 TFLOPS of work each.
"""


bench_dit7b_8k_1gpu_l8 = variant("bench_dit7b_8k_1gpu_L8", lambda: _on_one_gpu(8, CLIP_8K))
"""8 layers of DiT-7B (1.83 B) at 8192 tokens on one GPU.

A GPU of 80 GB. See bench_dit7b_8k_1gpu_L4; a step is 73 TFLOP of work.
"""


bench_dit7b_74k_1gpu_l4 = variant(
    "bench_dit7b_74k_1gpu_L4", lambda: _on_one_gpu(4, CLIP_74K), training={"recompute": "selective"}
)
"""4 layers of DiT-7B (933 M) at 73,728 tokens on one GPU of 140 GB, where attention is nearly all of the work.

A step is 1.04 PFLOP of work. Modulated norms and activations of the MLP are recomputed.
"""


bench_dit7b_74k_1gpu_l8 = variant(
    "bench_dit7b_74k_1gpu_L8", lambda: _on_one_gpu(8, CLIP_74K), training={"recompute": "full"}
)
"""8 layers of DiT-7B (1.83 B) at 73,728 tokens on one GPU of 140 GB, every layer recomputed.

A step is 2.08 PFLOP of work and 0.69 of recomputation.
"""


def _matrix(*, pipeline: bool = False, experts: bool = False, fsdp: bool = False) -> run.Partial:
    """Return a small DiT on clips of 1024 tokens, CP 2 x TP 2 + SP, with what else the row names."""
    model = dit_s()
    model.hidden_size, model.num_layers, model.num_attention_heads, model.num_classes = 256, 4, 8, 10
    model.position_embedding = "sincos_3d"
    parallel = run.Config(ParallelConfig, tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=2)
    if pipeline:
        parallel.pipeline_model_parallel_size = 2
    if experts:
        model.num_experts, model.moe_ffn_hidden_size = 8, 256
        parallel.expert_model_parallel_size = 2
    if fsdp:
        parallel.data_parallel = "fsdp"
    return run.Partial(
        pretrain,
        model=model,
        data=run.Config(MockData, frames=4, height=32, width=32, dataset_size=64, num_streams=8),
        objective=run.Config(FlowMatching),
        optimizer=adamw_large(),
        schedule=run.Config(Constant),
        parallel=parallel,
        training=run.Config(
            TrainingConfig,
            num_steps=20,
            global_batch_size=8,
            ema_decay=None,
            log_interval=1,
        ),
        checkpoint=run.Config(CheckpointConfig, interval=0, resume="never"),
        logging=run.Config(LoggingConfig),
        sampling=run.Config(SamplingConfig),
    )


matrix_fsdp = variant(
    "matrix_fsdp", lambda: _matrix(fsdp=True), parallel=run.Config(ParallelConfig, data_parallel="fsdp")
)
"""A small DiT on clips of 1024 tokens with FSDP only: 1, 2, 4 or 8 ranks.

Twenty steps, to see a layout train before a long run is given to it; `python -m benchmarks.parallel_matrix`
compares every parameter's gradient with one rank.
"""


matrix_cp_tp_sp_fsdp = variant("matrix_cp_tp_sp_fsdp", lambda: _matrix(fsdp=True))
"""A small DiT on clips of 1024 tokens, CP 2 x TP 2 + SP x FSDP: 8 ranks, CPU or GPU.

See matrix_fsdp; a replica is 4 ranks, and FSDP shards over two replicas and their context ranks.
"""


matrix_cp_tp_sp_distopt = variant("matrix_cp_tp_sp_distopt", lambda: _matrix())
"""A small DiT on clips of 1024 tokens, CP 2 x TP 2 + SP x distributed optimizer: 8 ranks, CPU or GPU.

See matrix_fsdp; a replica is 4 ranks, of which there are two.
"""


matrix_cp_tp_sp_pp_distopt = variant("matrix_cp_tp_sp_pp_distopt", lambda: _matrix(pipeline=True))
"""A small DiT on clips of 1024 tokens, CP 2 x TP 2 + SP x PP 2, distributed optimizer: 8 ranks, CPU or GPU.

See matrix_fsdp; one replica is all 8 ranks, in two stages of two layers.
"""


matrix_cp_tp_sp_pp_distopt_ep = variant("matrix_cp_tp_sp_pp_distopt_ep", lambda: _matrix(pipeline=True, experts=True))
"""A small DiT with 8 experts, CP 2 x TP 2 + SP x PP 2 x EP 2, distributed optimizer: 8 ranks, CPU or GPU.

See matrix_fsdp; 8 ranks, CPU or GPU, with 4 experts of each layer per rank.
"""


matrix_cp_tp_sp_fsdp_ep = variant("matrix_cp_tp_sp_fsdp_ep", lambda: _matrix(experts=True, fsdp=True))
"""A small DiT with 8 experts, CP 2 x TP 2 + SP x EP 2 x FSDP: 8 ranks, CPU or GPU.

See matrix_fsdp; each rank works with 4 of a layer's experts.
"""


def _stage(recipe: run.Partial, latent: tuple[int, int, int]) -> run.Partial:
    """Return a stage of Movie Gen's training on synthetic data, to be measured."""
    layout, training = recipe.parallel, recipe.training
    measured = as_mock(as_large_model(text_conditional(recipe.model)), latent)
    measured.parallel = layout
    measured.training.micro_batch_size = training.micro_batch_size
    measured.training.global_batch_size = training.global_batch_size
    measured.training.recompute = training.recompute
    return measured


stage_5b_256 = variant("stage_5b_256", lambda: _stage(moviegen.pretrain_ditllama5b(), IMAGE_256))
"""MovieGen-5B (5.74 B), stage 1 on synthetic images of 256 tokens, as pretrain_ditllama5b: 16 x 80 GB or more.

A step is 29 PFLOP of work: 4.6 s if every GPU reaches 400 TFLOPS.
"""


stage_5b_8k = variant("stage_5b_8k", lambda: _stage(moviegen.pretrain_ditllama5b_stage2(), CLIP_8K))
"""MovieGen-5B (5.74 B), stage 2 on synthetic clips of 8192 tokens, TP 2 + SP: 8 x 80 GB or more.

A step is 70 PFLOP of work: 22 s if every GPU reaches 400 TFLOPS.
"""


stage_5b_74k = variant("stage_5b_74k", lambda: _stage(moviegen.pretrain_ditllama5b_stage3(), CLIP_74K))
"""MovieGen-5B (5.74 B), stage 3 on synthetic clips of 73,728 tokens, TP 2 + SP, CP 4: 8 x 141 GB or more.

A step is 2.1 EFLOP of work: 11 minutes if every GPU reaches 400 TFLOPS. Cheap
activations are recomputed; --dryrun estimates 70 GiB on each of 8 GPUs, 28 with `training.recompute=full`.
"""


stage_30b_256 = variant("stage_30b_256", lambda: _stage(moviegen.pretrain_ditllama30b(), IMAGE_256))
"""MovieGen-30B (33.4 B), stage 1 on synthetic images of 256 tokens, FSDP: 128 x 80 GB.

A step is 326 PFLOP of work: 6.4 s if every GPU reaches 400 TFLOPS.
"""


stage_30b_8k = variant("stage_30b_8k", lambda: _stage(pretrain_ditllama30b_stage2_mock(), CLIP_8K))
"""MovieGen-30B (33.4 B), stage 2 on synthetic clips of 8192 tokens, TP 2 + SP, CP 4, FSDP: 64 x 80 GB, 32 GiB each.

A step is 346 PFLOP of work: 14 s if every GPU reaches 400 TFLOPS.
"""


stage_30b_74k = variant("stage_30b_74k", lambda: _stage(pretrain_ditllama30b_stage3_mock(), CLIP_74K))
"""MovieGen-30B (33.4 B), stage 3 on synthetic clips of 73,728 tokens, TP 2 + SP, CP 8, FSDP: 128 x 80 GB.

A step is 7.5 EFLOP of work: 2.4 minutes if every GPU reaches 400 TFLOPS. Cheap
activations are recomputed; --dryrun estimates 59 GiB on each GPU, 16 with `training.recompute=full`.
"""
