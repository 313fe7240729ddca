"""Lines of healthy jobs, and failure lines without information: no root or cascade signature may match them."""

from __future__ import annotations

HEALTHY_LINES = (
    "ERROR",
    "RuntimeError:",
    "ValueError:",
    "Traceback (most recent call last):",
    '  File "/workspace/train.py", line 212, in <module>',
    "    main()",
    "INFO 2026-01-05 09:14:07 trainer.py:88 epoch 3 step 100 loss 1.23 lr 2e-05 grad_norm 0.84",
    "{'loss': 1.2291, 'grad_norm': 0.8412, 'learning_rate': 1.94e-05, 'epoch': 0.31}",
    "step 1200 | loss 2.031 | 41,230 tokens/s | 61.2 GiB | 38.1% MFU",
    " 12%|█▏        | 61/500 [01:42<12:19,  1.68s/it]",
    "Loading checkpoint shards: 100%|██████████| 4/4 [00:09<00:00,  2.31s/it]",
    "Map (num_proc=16): 100%|██████████| 52002/52002 [00:21<00:00, 2441.17 examples/s]",
    "***** Running training *****",
    "  Instantaneous batch size per device = 4",
    "  Total train batch size (w. parallel, distributed & accumulation) = 128",
    "[INFO|trainer.py:3503] 2026-01-05 09:31:40,117 >> Saving model checkpoint to output/checkpoint-500",
    "W0105 09:12:55.310000 4242 torch/distributed/run.py:793] *****************************************",
    "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being "
    "overloaded, please further tune the variable for optimal performance in your application as needed.",
    "I0105 09:12:56.001000 4242 torch/distributed/launcher/api.py:194] Starting elastic_operator with launch configs:",
    "[2026-01-05 09:12:58,447] [INFO] [comm.py:652:init_distributed] cdb=None",
    "[2026-01-05 11:40:02,903] [INFO] [launch.py:351:main] Process 4243 exits successfully.",
    "gpu-07:4243:4243 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.7<0>",
    "gpu-07:4243:4243 [0] NCCL INFO cudaDriverVersion 12040",
    "NCCL version 2.21.5+cuda12.4",
    "gpu-07:4243:4301 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0>",
    "gpu-07:4243:4301 [0] NCCL INFO Using network Socket",
    "gpu-07:4243:4301 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
    "gpu-07:4243:4301 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct",
    "gpu-07:4243:4301 [0] NCCL INFO Connected all rings",
    "gpu-07:4243:4301 [0] NCCL INFO comm 0x55d0c8a0 rank 0 nranks 2 cudaDev 0 busId 1000 - Init COMPLETE",
    "/opt/lib/python3.11/site-packages/torch/utils/checkpoint.py:295: FutureWarning: `torch.cpu.amp.autocast(args...)` "
    "is deprecated. Please use `torch.amp.autocast('cpu', args...)` instead.",
    "UserWarning: torch.utils.data.DataLoader: pin_memory is set but no accelerator is found.",
    "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.",
    "wandb: Syncing run swift-river-12",
    "Training completed. Do not forget to share your model on huggingface.co/models =)",
)
