"""The tests that should see mutants, by name."""

BOUND = "tests/unit/objectives/test_variational_bound.py"
OBJECTIVES = "tests/unit/objectives/test_objectives.py"
NOISE_LEVELS = "tests/unit/objectives/test_noise_levels.py"
NOISE = "tests/unit/objectives/test_addressed_noise.py"
GUIDANCE = "tests/unit/sampling/test_guidance.py"
GENERATE = "tests/unit/sampling/test_generate.py"
SOLVERS = "tests/unit/sampling/test_solvers.py"
UNCERTAINTY = "tests/unit/objectives/test_uncertainty.py"
CONDITIONS = "tests/unit/test_conditions.py"
LAYERS = "tests/unit/layers/test_layers.py"
EMBEDDINGS = "tests/unit/layers/test_embeddings.py"
ROTARY = "tests/unit/layers/test_rotary.py"
MOE = "tests/unit/layers/test_moe.py"
ATTENTION = "tests/unit/kernels/test_attention.py"
CHOICE, GRAPHS = "tests/unit/kernels/test_choice.py", "tests/unit/kernels/test_graph_layers.py"
FUSED = "tests/unit/kernels/test_fused.py"
FUSED_LAYERS, FUSED_PICTURES, FUSED_NOISE, FUSED_UPDATE = (
    f"{FUSED}::test_every_kernel_is_its_formula_in_the_interpreter[{part}]"
    for part in ("layers", "pictures", "noise", "update")
)
FUSED_OPS = "tests/unit/kernels/test_modulation.py"
BATCH = "tests/unit/test_batch.py"
DAMAGE = "tests/unit/energon_data/test_data_damage.py"
INSPECT = "tests/unit/energon_data/test_inspect.py"
PACKING = "tests/unit/energon_data/test_data_packing.py"
STREAMS, WORKERS = "tests/unit/energon_data/test_data_streams.py", "tests/unit/energon_data/test_background.py"
LOSSES = "tests/unit/training/test_losses.py"
SCHEDULES = "tests/unit/optimizer/test_schedules.py"
STORE = "tests/unit/checkpoint/test_checkpoint_store.py"
AVERAGE, NEMO = "tests/unit/optimizer/test_ema.py", "tests/unit/launch/test_nemo_config.py"
FLOPS = "tests/unit/monitoring/test_flops.py"
CONTEXT_ROWS = "tests/unit/context_parallel/test_partition.py"
DIT, DIT_CROSS, FLUX, MOE_PARITY = (f"tests/parity/test_{name}.py" for name in ("dit", "dit_cross", "flux", "moe"))
AUTOENCODER, AUTOENCODING = "tests/parity/test_convert_autoencoder.py", "tests/unit/objectives/test_autoencoding.py"
PICTOGRAMS, RANKS = "tests/unit/energon_data/test_pictograms.py", "tests/unit/launch/test_pictograms.py"
RULES = "tests/unit/convert/test_rules.py"
NUMBERS, HEARTBEAT = "tests/unit/monitoring/test_numbers.py", "tests/unit/monitoring/test_heartbeat.py"
FOLDER_DAMAGE, RECORDS = "tests/unit/energon_data/test_folder_damage.py", "tests/unit/checkpoint/test_records.py"
DETERMINISTIC, OVERRIDES = "tests/unit/backends/test_deterministic.py", "tests/unit/launch/test_overrides.py"
ERRORS, SHARDS = "tests/unit/test_errors.py", "tests/unit/energon_data/test_shards.py"
STATUS = "tests/unit/launch/test_status.py"
IMAGEN, AUGMENTATION = "tests/parity/test_imagen.py", "tests/unit/objectives/test_augmentation.py"
STABLE, DROPOUT = "tests/unit/kernels/test_stable_attention.py", "tests/unit/layers/test_dropout.py"
LAYOUTS, EXPERTS, BACKBONES = (f"tests/parallel/test_{name}.py" for name in ("layouts", "experts", "backbones"))
LOSS_SCALE, EVALUATION = (f"tests/parallel/test_{name}.py" for name in ("loss_scale", "evaluation"))
TILES = "tests/unit/sampling/test_tiles.py"
OPTIMIZER, STEP = "tests/parallel/test_optimizer.py", "tests/unit/training/test_step.py"
RESUME, FSDP = "tests/integration/test_resume.py", "tests/parallel/test_fsdp.py"
CORRUPTION, FOLDER = (f"tests/unit/energon_data/test_{name}.py" for name in ("corruption", "prepare_folder"))
OWN_DATA = "tests/unit/recipes/test_own_data.py"
GROWTH = "tests/unit/planner/test_growth.py"
LORA, CONVERT_LORA = "tests/unit/models/test_lora.py", "tests/parity/test_convert_lora.py"
BOXES, STATE_FILES, HOSTILE, RESUME_CHECK = (
    f"tests/unit/checkpoint/test_{name}.py" for name in ("boxes", "state_files", "hostile_checkpoint", "resume_check")
)

WRITER, SAVES = "tests/unit/checkpoint/test_writer.py", "tests/integration/test_saves.py"
REMOTE, LOCK = "tests/unit/checkpoint/test_remote.py", "tests/unit/monitoring/test_run_lock.py"
VERIFY = "tests/parallel/test_verify.py"
INCEPTION = "tests/unit/evaluation/test_inception.py"
LIMIT = "tests/unit/monitoring/test_time_limit.py"
RECHECK = "tests/faults/test_recheck.py"
