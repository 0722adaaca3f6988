"""The mistakes that the suite must see: one changed line each, with the tests that should fail because of it."""

from tests.mutants.runner import Mutant

BOUND = "tests/unit/objectives/test_variational_bound.py"
OBJECTIVES = "tests/unit/objectives/test_objectives.py"
NOISE_LEVELS = "tests/unit/objectives/test_noise_levels.py"
NOISE = "tests/unit/objectives/test_addressed_noise.py"
GUIDANCE = "tests/unit/sampling/test_guidance.py"
GENERATE = "tests/unit/sampling/test_generate.py"
SOLVERS = "tests/unit/sampling/test_solvers.py"
LAYERS = "tests/unit/layers/test_layers.py"
EMBEDDINGS = "tests/unit/layers/test_embeddings.py"
ROTARY = "tests/unit/layers/test_rotary.py"
MOE = "tests/unit/layers/test_moe.py"
ATTENTION = "tests/unit/kernels/test_attention.py"
FUSED_OPS = "tests/unit/kernels/test_modulation.py"
BATCH = "tests/unit/test_batch.py"
PACKING = "tests/unit/energon_data/test_data_packing.py"
STREAMS = "tests/unit/energon_data/test_data_streams.py"
LOSSES = "tests/unit/training/test_losses.py"
SCHEDULES = "tests/unit/optimizer/test_schedules.py"
STORE = "tests/unit/checkpoint/test_checkpoint_store.py"
FLOPS = "tests/unit/monitoring/test_flops.py"
CONTEXT_ROWS = "tests/unit/context_parallel/test_partition.py"
DIT, DIT_CROSS, FLUX, MOE_PARITY = (f"tests/parity/test_{name}.py" for name in ("dit", "dit_cross", "flux", "moe"))
AUTOENCODER, AUTOENCODING = "tests/parity/test_convert_autoencoder.py", "tests/unit/objectives/test_autoencoding.py"
PICTOGRAMS, RANKS = "tests/unit/energon_data/test_pictograms.py", "tests/unit/launch/test_pictograms.py"
RULES = "tests/unit/convert/test_rules.py"
LAYOUTS, EXPERTS, BACKBONES = (f"tests/parallel/test_{name}.py" for name in ("layouts", "experts", "backbones"))
OPTIMIZER, STEP = "tests/parallel/test_optimizer.py", "tests/unit/training/test_step.py"
RESUME = "tests/integration/test_resume.py"
BOXES, STATE_FILES, HOSTILE, RESUME_CHECK = (
    f"tests/unit/checkpoint/test_{name}.py" for name in ("boxes", "state_files", "hostile_checkpoint", "resume_check")
)

MUTANTS = (
    # What trains: loss weights, dropped conditions, optimizer, average.
    Mutant(
        "EDM: weight times sigma",
        "dit/objectives/edm.py",
        "weight_S=sample_weights(batch),",
        "weight_S=sample_weights(batch) * sigma_S,",
        (OBJECTIVES,),
    ),
    Mutant(
        "condition dropped where it should stay",
        "dit/conditions.py",
        "< condition.dropout",
        "> condition.dropout",
        (STEP,),
    ),
    Mutant(
        "gradient clipped at three times the norm",
        "dit/optimizer/master_weights.py",
        "max_norm=clip_grad, total_norm",
        "max_norm=3 * clip_grad, total_norm",
        (OPTIMIZER,),
    ),
    Mutant(
        "learning rate times 1.5",
        "dit/optimizer/master_weights.py",
        'group["lr"] = lr',
        'group["lr"] = 1.5 * lr',
        (OPTIMIZER,),
    ),
    Mutant(
        "no weight decay",
        "dit/parallel/build.py",
        'settings.weight_decay * group["wd_mult"]',
        '0.0 * group["wd_mult"]',
        (OPTIMIZER,),
    ),
    Mutant(
        "beta1 halved",
        "dit/parallel/build.py",
        "adam_beta1=settings.beta1",
        "adam_beta1=settings.beta1 / 2",
        (OPTIMIZER,),
    ),
    Mutant(
        "beta2 taken for beta1",
        "dit/parallel/build.py",
        "adam_beta2=settings.beta2",
        "adam_beta2=settings.beta1",
        (OPTIMIZER,),
    ),
    Mutant(
        "eps a hundredfold",
        "dit/parallel/build.py",
        "adam_eps=settings.eps",
        "adam_eps=100 * settings.eps",
        (OPTIMIZER,),
    ),
    Mutant(
        "average: decay squared",
        "dit/optimizer/ema.py",
        "mains, 1.0 - self.decay)",
        "mains, 1.0 - self.decay**2)",
        (OPTIMIZER,),
    ),
    Mutant(
        "average starts a step early",
        "dit/optimizer/ema.py",
        "if step <= self.start_step:",
        "if step < self.start_step:",
        (OPTIMIZER,),
    ),
    Mutant(
        "schedule: the first update has rate 0",
        "dit/optimizer/schedules.py",
        "schedule.rate(step + 1, num_steps",
        "schedule.rate(step, num_steps",
        (SCHEDULES,),
    ),
    Mutant(
        "schedule: torch's one-cycle peaks on a whole update",
        "dit/optimizer/schedules.py",
        "min(update, num_steps), self.pct_start * num_steps",
        "min(update, num_steps), int(self.pct_start * num_steps)",
        (SCHEDULES,),
    ),
    Mutant(
        "schedule: beta1 stays",
        "dit/optimizer/master_weights.py",
        '(beta1, group["betas"][1])',
        'group["betas"]',
        (OPTIMIZER,),
    ),
    Mutant(
        "schedule: the cosine ends before the floor",
        "dit/optimizer/schedules.py",
        "(update - start) / (num_steps - start)",
        "(update - start) / num_steps",
        (SCHEDULES,),
    ),
    Mutant(
        "gradients divided by twice the tokens",
        "dit/training/step.py",
        "return total, count.int(),",
        "return total, 2 * count.int(),",
        (LOSSES,),
    ),
    Mutant(
        "held-out loss forgets the sample weights",
        "dit/objectives/base.py",
        "layout.sum_per_sample(self.error_T) * self.weight_S",
        "layout.sum_per_sample(self.error_T)",
        (LOSSES,),
    ),
    # Objectives and the loss.
    Mutant(
        "EDM: c_out without sigma_data",
        "dit/objectives/edm.py",
        "sigma * self.sigma_data / total.sqrt()",
        "sigma / total.sqrt()",
        (OBJECTIVES,),
    ),
    Mutant(
        "EDM: the network gets log(sigma) / 2 in training",
        "dit/objectives/edm.py",
        "time_S=sigma_S.log() / 4,",
        "time_S=sigma_S.log() / 2,",
        (OBJECTIVES,),
    ),
    Mutant(
        "flow matching: velocity reversed",
        "dit/objectives/flow_matching.py",
        "weight_S = eps_TC - x0_TC, sample_weights(batch)",
        "weight_S = x0_TC - eps_TC, sample_weights(batch)",
        (OBJECTIVES,),
    ),
    Mutant(
        "flow matching: x0 weighted by 1 / t",
        "dit/objectives/flow_matching.py",
        "weight_S / t_S.clamp(min=MIN_TIME) ** 2",
        "weight_S / t_S.clamp(min=MIN_TIME)",
        (OBJECTIVES,),
    ),
    Mutant(
        "DDPM: sign of v",
        "dit/objectives/ddpm.py",
        "target_TC = alpha_T1 * eps_TC - sigma_T1 * x0_TC",
        "target_TC = alpha_T1 * eps_TC + sigma_T1 * x0_TC",
        (OBJECTIVES,),
    ),
    Mutant(
        "noise levels: variance for deviation",
        "dit/objectives/noise_levels.py",
        "torch.exp(mean + std * ",
        "torch.exp(mean + std**2 * ",
        (NOISE_LEVELS,),
    ),
    Mutant(
        "noise levels: product of betas to first order",
        "dit/objectives/noise_levels.py",
        "_angle_of_decay(-torch.log1p(-betas).cumsum(0))",
        "_angle_of_decay(betas.cumsum(0))",
        (NOISE_LEVELS,),
    ),
    Mutant(
        "noise levels: cosine offset",
        "dit/objectives/noise_levels.py",
        "COSINE_OFFSET = 0.008",
        "COSINE_OFFSET = 0.01",
        (NOISE_LEVELS,),
    ),
    Mutant(
        "loss: padding counts as tokens",
        "dit/objectives/base.py",
        "layout.valid_T.sum().float()",
        "torch.ones_like(layout.valid_T).sum().float()",
        (OBJECTIVES,),
    ),
    Mutant(
        "loss: sum over channels for the mean",
        "dit/objectives/base.py",
        "pointwise_error(prediction_TC, target_TC, kind).mean(-1)",
        "pointwise_error(prediction_TC, target_TC, kind).sum(-1)",
        (OBJECTIVES,),
    ),
    Mutant(
        "learned variance: the bound moves the mean",
        "dit/objectives/ddpm.py",
        "(prepared.inputs_TC, prepared.target_TC, output_TC.detach(), v_TC)",
        "(prepared.inputs_TC, prepared.target_TC, output_TC, v_TC)",
        (BOUND,),
    ),
    Mutant(
        "learned variance: interpolated between variances",
        "dit/objectives/variational_bound.py",
        "log_variance_TC = part_TC * log_beta_T1 + (1 - part_TC) * log_posterior_T1",
        "log_variance_TC = (part_TC * log_beta_T1.exp() + (1 - part_TC) * log_posterior_T1.exp()).log()",
        (BOUND,),
    ),
    Mutant(
        "learned variance: the first step has a divergence",
        "dit/objectives/variational_bound.py",
        "step_T1 == 0,",
        "step_T1 < 0,",
        (BOUND,),
    ),
    Mutant(
        "min-SNR: the SNR is that of amplitudes",
        "dit/objectives/base.py",
        "(alpha / sigma).square().clamp(max=gamma)",
        "(alpha / sigma).clamp(max=gamma)",
        (OBJECTIVES,),
    ),
    Mutant(
        "outputs of a patch: not sorted apart",
        "dit/patchify.py",
        "at_position = prediction_TC.unflatten(1, (token_channels // latent_channels, -1))",
        "return prediction_TC",
        (LOSSES,),
    ),
    Mutant(
        "loss: half of l1",
        "dit/objectives/base.py",
        "return difference.abs()",
        "return difference.abs() / 2",
        (OBJECTIVES,),
    ),
    # Noise by address.
    Mutant(
        "noise: the same at every step",
        "dit/objectives/addressed_noise.py",
        "torch.full_like(element, self.step)",
        "torch.zeros_like(element)",
        (NOISE,),
    ),
    Mutant(
        "noise: the same for every purpose",
        "dit/objectives/addressed_noise.py",
        "(self.seed ^ zlib.crc32(purpose.encode())) & MASK32",
        "self.seed & MASK32",
        (NOISE,),
    ),
    Mutant(
        "noise: half of the sample's address ignored",
        "dit/objectives/addressed_noise.py",
        "(ids >> 32) & MASK32), key)",
        "ids & MASK32), key)",
        (NOISE,),
    ),
    Mutant(
        "noise: pairs of channels share a radius",
        "dit/philox.py",
        "(-2 * u2.log()).sqrt()",
        "(-2 * u0.log()).sqrt()",
        (NOISE,),
    ),
    # Sampling.
    Mutant(
        "guidance: the scale of NeMo",
        "dit/sampling/guidance.py",
        "    return uncond + scale * (cond - uncond)",
        "    return cond + scale * (cond - uncond)",
        (GUIDANCE,),
    ),
    Mutant(
        "guidance: thresholds below 1",
        "dit/sampling/guidance.py",
        ".values.clamp(min=1)",
        ".values.clamp(min=0)",
        (GUIDANCE,),
    ),
    Mutant(
        "guidance: away from class 0",
        "dit/conditions.py",
        "return self.num_classes if self.null",
        "return 0 if self.null",
        (GENERATE,),
    ),
    Mutant(
        "Heun: no correction",
        "dit/sampling/solvers.py",
        "h / 2 * (slope_TC + slope_next_TC)",
        "h * slope_TC",
        (SOLVERS,),
    ),
    Mutant(
        "DDIM: deviations subtracted for variances",
        "dit/sampling/solvers.py",
        "math.sqrt(sigma_next**2 - fresh**2)",
        "sigma_next - fresh",
        (SOLVERS,),
    ),
    Mutant(
        "DPM-Solver++: half of the extrapolation",
        "dit/sampling/solvers.py",
        "h / (2 * h_previous) *",
        "h / (4 * h_previous) *",
        (SOLVERS,),
    ),
    Mutant(
        "stochastic solvers: the same noise at every step",
        "dit/sampling/generate.py",
        "AddressedNoise(seed, step + 1, batch",
        "AddressedNoise(seed, 1, batch",
        (GENERATE,),
    ),
    # Layers.
    Mutant(
        "adaLN: torch's eps for the model's",
        "dit/kernels/modulation.py",
        "F.layer_norm(x_TD, x_TD.shape[-1:], eps=eps)",
        "F.layer_norm(x_TD, x_TD.shape[-1:])",
        (FUSED_OPS, DIT),
    ),
    Mutant(
        "gated residual: the gate takes the input, too",
        "dit/kernels/modulation.py",
        "(x_TD.view(shape) + gate * y_TD.view(shape))",
        "(gate * x_TD.view(shape) + gate * y_TD.view(shape))",
        (FUSED_OPS, DIT),
    ),
    Mutant(
        "adaLN: no SiLU before the modulation",
        "dit/layers/adaln.py",
        "self.linear(self.down(nn.functional.silu(cond_SD)))",
        "self.linear(self.down(cond_SD))",
        (LAYERS, DIT),
    ),
    Mutant(
        "adaLN-single: no SiLU before the shared modulation",
        "dit/layers/adaln.py",
        "return self.linear(nn.functional.silu(cond_SD))",
        "return self.linear(cond_SD)",
        ("tests/parity/test_wan.py",),
    ),
    Mutant(
        "attention: keys do not turn",
        "dit/layers/attention.py",
        "rotate(q, rotation), rotate(k, rotation)",
        "rotate(q, rotation), k",
        (ROTARY, DIT_CROSS),
    ),
    Mutant(
        "attention: segments of unlike text in one batch",
        "dit/kernels/attention.py",
        "groups[lengths].append(i)",
        "groups[(lengths[0], layout_k.lengths[0])].append(i)",
        (ATTENTION,),
    ),
    Mutant(
        "rotary: a mirror for a turn",
        "dit/kernels/rope.py",
        "a * cos - b * sin, b * cos + a * sin",
        "a * cos + b * sin, b * cos - a * sin",
        (ROTARY,),
    ),
    Mutant(
        "rotary: stretch without the last wavelength",
        "dit/layers/positions.py",
        "** (count / (count - 1))",
        "** 1.0",
        (ROTARY,),
    ),
    Mutant(
        "positions: h before w in the paper's order",
        "dit/layers/positions.py",
        "torch.cat([sincos_1d(w, hidden_size // 2), sincos_1d(h, hidden_size // 2)], -1)",
        "torch.cat([sincos_1d(h, hidden_size // 2), sincos_1d(w, hidden_size // 2)], -1)",
        (EMBEDDINGS, DIT),
    ),
    Mutant(
        "time: frequencies end one later",
        "dit/layers/embeddings.py",
        "dtype=torch.float64) / (half - shift))",
        "dtype=torch.float64) / (half - 1))",
        (EMBEDDINGS, DIT),
    ),
    Mutant(
        "size: frames times the rate",
        "dit/layers/conditioner.py",
        "frames_S / fps_S",
        "frames_S * fps_S",
        (LAYERS, DIT_CROSS),
    ),
    Mutant(
        "text: null where there is text",
        "dit/layers/text.py",
        "self.null, context_KD)",
        "context_KD, self.null)",
        (LAYERS, DIT_CROSS),
    ),
    Mutant(
        "text: sum for the mean",
        "dit/layers/embeddings.py",
        "(text.layout.sum_per_sample(text.values.float()) / lengths)",
        "(text.layout.sum_per_sample(text.values.float()) * 1.0)",
        (LAYERS,),
    ),
    # Packs.
    Mutant(
        "patches: rows and columns change places",
        "dit/patchify.py",
        '"c (t pt) (h ph) (w pw) -> (t h w) (ph pw pt c)"',
        '"c (t pt) (h ph) (w pw) -> (t h w) (pw ph pt c)"',
        ("tests/unit/test_patchify.py",),
    ),
    Mutant(
        "patches: positions in another order",
        "dit/patchify.py",
        'indexing="ij"',
        'indexing="xy"',
        ("tests/unit/test_patchify.py",),
    ),
    Mutant(
        "layout: tokens counted from the unpadded start",
        "dit/layout.py",
        "indices_T - self.cu_seqlens_padded.long()",
        "indices_T - self.cu_seqlens.long()",
        (BATCH,),
    ),
    Mutant(
        "layout: one padding row is real",
        "dit/layout.py",
        "self.token_index_T < lengths[self.segment_ids_T]",
        "self.token_index_T <= lengths[self.segment_ids_T]",
        (BATCH,),
    ),
    Mutant(
        "packing: one token too many",
        "energon_data/packing.py",
        "room, items = capacity, []",
        "room, items = capacity + 1, []",
        (PACKING,),
    ),
    Mutant(
        "packing: padding between samples forgotten",
        "dit/layout.py",
        "zip(self.starts, self.lengths):",
        "zip(accumulate(self.lengths, initial=0), self.lengths):",
        (PACKING,),
    ),
    # Experts.
    Mutant(
        "experts: capacity rounded down",
        "dit/layers/routing.py",
        "min(length, math.ceil(exact))",
        "min(length, math.floor(exact))",
        (MOE,),
    ),
    Mutant(
        "experts: padding chooses",
        "dit/layers/routing.py",
        "return selected_TE & valid_T[:, None]",
        "return selected_TE",
        (MOE,),
    ),
    Mutant(
        "experts: balancing loss without their number",
        "dit/layers/routing.py",
        "return num_experts * (layout",
        "return 1 * (layout",
        (MOE, MOE_PARITY),
    ),
    Mutant(
        "experts: outputs not weighted",
        "dit/layers/moe.py",
        "(expert(tokens_PD) * weights_P[:, None])",
        "(expert(tokens_PD) * torch.ones_like(weights_P)[:, None])",
        (MOE,),
    ),
    # Parallel layouts.
    Mutant(
        "sequence parallel: gradients of split rows not summed",
        "dit/backends/sharding.py",
        "sequence_parallel=sequence_parallel) and sequence_parallel,",
        "sequence_parallel=sequence_parallel) and False,",
        (LAYOUTS,),
    ),
    Mutant(
        "sequence parallel: the output's gradient summed",
        "dit/layers/tokens.py",
        "tensor_parallel_output_grad=False",
        "tensor_parallel_output_grad=True",
        (LAYOUTS,),
    ),
    Mutant(
        "pipeline: the norm counts every copy",
        "dit/backends/sharding.py",
        '"shared": copies and not first_stage',
        '"shared": False',
        (BACKBONES,),
    ),
    Mutant(
        "pipeline: labels' gradients not summed over stages",
        "dit/layers/conditioner.py",
        "state_every_stage(self.parameters())",
        "state_every_stage([])",
        (BACKBONES,),
    ),
    Mutant(
        "pipeline: activations in flight",
        "dit/parallel/pipeline.py",
        "passes = 2 * (pp_size - pp_rank - 1)",
        "passes = (pp_size - pp_rank - 1)",
        ("tests/unit/parallel/test_stages.py",),
    ),
    Mutant(
        "context parallel: blocks joined by the larger sum",
        "dit/context_parallel/attention.py",
        "torch.logaddexp(joined.lse_TN, part.lse_TN)",
        "torch.maximum(joined.lse_TN, part.lse_TN)",
        ("tests/unit/kernels/test_attention_blocks.py",),
    ),
    Mutant(
        "context parallel: balanced chunks not mirrored",
        "dit/context_parallel/partition.py",
        "torch.minimum(chunk_T, chunks - 1 - chunk_T)",
        "chunk_T % size",
        (CONTEXT_ROWS,),
    ),
    Mutant(
        "joint attention: text behind the image",
        "dit/joint_layout.py",
        "torch.where(on_host.valid_T, part, 2)",
        "torch.where(on_host.valid_T, 1 - part, 2)",
        (FLUX,),
    ),
    Mutant(
        "experts: gradients reduced over all ranks",
        "dit/backends/sharding.py",
        '"allreduce": not sharding.expert',
        '"allreduce": True',
        (EXPERTS,),
    ),
    # Checkpoints and data positions.
    Mutant(
        "checkpoints: content not compared",
        "dit/checkpoint/manifest.py",
        "if now != record:",
        "if now.size_bytes != record.size_bytes:",
        (STORE,),
    ),
    Mutant(
        "checkpoints: the wrong ones stay",
        "dit/checkpoint/store.py",
        "if step % self.config.keep_every == 0",
        "if step % self.config.keep_every == 1",
        (STORE,),
    ),
    Mutant(
        "checkpoints: every copy writes from the start",
        "dit/checkpoint/boxes.py",
        "for i in (index, index + 1))",
        "for i in (0, index + 1))",
        (BOXES,),
    ),
    Mutant(
        "checkpoints: every part lies at the origin",
        "dit/checkpoint/boxes.py",
        "yield box.shifted(self.origin), flat",
        "yield box, flat",
        (BOXES,),
    ),
    Mutant(
        "checkpoints: a gap in a tensor passes",
        "dit/checkpoint/state_files.py",
        "if stored != math.prod(shape):",
        "if stored > math.prod(shape):",
        (STATE_FILES,),
    ),
    Mutant(
        "checkpoints: a description may name any function",
        "dit/checkpoint/torch_dist.py",
        "if (module, name) not in KNOWN:",
        "if not module:",
        (HOSTILE,),
    ),
    Mutant(
        "resume: another experiment passes",
        "dit/checkpoint/resume_check.py",
        "return name not in reported and EVERY not in reported",
        "return False",
        (RESUME_CHECK,),
    ),
    Mutant(
        "resume: samples counted from 0",
        "dit/checkpoint/checkpointer.py",
        'int(manifest.meta["consumed_samples"])',
        "0",
        (RESUME,),
    ),
    Mutant(
        "resume: Adam's step count lost",
        "dit/optimizer/master_weights.py",
        "torch.tensor(float(step), device=device)",
        "torch.tensor(1.0, device=device)",
        (OPTIMIZER,),
    ),
    Mutant(
        "streams: every rank starts its turn anew",
        "energon_data/streams.py",
        'self._cursor = state["next"] // self._dp_size',
        "self._cursor = 0",
        (STREAMS,),
    ),
    Mutant(
        "streams: one lost sample too many",
        "energon_data/skip_log.py",
        "skip.lost and self._lost.total() > self.budget",
        "skip.lost and self._lost.total() > self.budget + 1",
        ("tests/unit/energon_data/test_data_damage.py",),
    ),
    Mutant(
        "texts: the last tokens for the first",
        "energon_data/task_encoder.py",
        "value[: self.options.max_text_tokens]",
        "value[-(self.options.max_text_tokens or 0) :]",
        (PACKING, STREAMS),
    ),
    Mutant(
        "texts: embeddings in the order of their length",
        "dit/encoders/text.py",
        "[embedded[text].clone() for text in texts]",
        "[embedded[text].clone() for text in sorted(texts, key=len)]",
        ("tests/unit/encoders/test_text.py",),
    ),
    # Other code bases' weights, and counts.
    Mutant(
        "convert: chunks by the inverse order",
        "dit/convert/rules.py",
        "chunks[self.order.index(i)] for i in range",
        "chunks[self.order[i]] for i in range",
        (RULES,),
    ),
    Mutant(
        "convert: the variance for the mean",
        "dit/convert/variance.py",
        "[:, : model.in_channels]",
        "[:, model.in_channels :]",
        (RULES,),
    ),
    # The autoencoder, and the pictograms it is trained on.
    Mutant(
        "autoencoder: divergence of the variance squared",
        "dit/objectives/autoencoding.py",
        "- 1 - log_variance_TC)",
        "- 1 - 2 * log_variance_TC)",
        (AUTOENCODING,),
    ),
    Mutant(
        "autoencoder: divergence per latent value",
        "dit/objectives/autoencoding.py",
        "self.kl_weight / channels",
        "self.kl_weight / (posterior_TC.shape[1] // 2)",
        (AUTOENCODING,),
    ),
    Mutant(
        "autoencoder: noise times the variance",
        "dit/models/autoencoder/model.py",
        "torch.exp(log_variance_NCHW / 2)",
        "torch.exp(log_variance_NCHW)",
        (AUTOENCODER,),
    ),
    Mutant(
        "autoencoder: padding on both sides before half the resolution",
        "dit/models/autoencoder/layer.py",
        "        if self.stride > 1:",
        "        if self.stride > 2:",
        (AUTOENCODER,),
    ),
    Mutant(
        "pictograms: the first wording for all",
        "energon_data/prepare/pictograms.py",
        "captions=(pictogram.caption(wording),)",
        "captions=(pictogram.caption(0),)",
        (PICTOGRAMS,),
    ),
    Mutant(
        "pictograms: a drawing that is as near pushes the one asked for back",
        "launch/pictograms.py",
        "distance_NM < own_N1",
        "distance_NM <= own_N1",
        (RANKS,),
    ),
    Mutant(
        "flops: recompute counts the ends, too",
        "dit/monitoring/flops.py",
        "round(recomputed * layers)",
        "round(recomputed * total)",
        (FLOPS,),
    ),
    Mutant(
        "flops: half of the attention of NeMo's count",
        "dit/monitoring/flops.py",
        "+ 4 * sizes.num_layers",
        "+ 2 * sizes.num_layers",
        (FLOPS,),
    ),
)
