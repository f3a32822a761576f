"""The programs: where each lies, how it is started, and what is expected of it. None of their lines is in this repository."""

from __future__ import annotations

from dataclasses import dataclass, field

EXAMPLES = "deepspeedai/DeepSpeedExamples"


@dataclass(frozen=True)
class Program:
    """One program with one command.

    Attributes:
        name: unique in the table.
        repository: `owner/name` on GitHub.
        folder: of the program in the repository; it runs there, in a copy.
        command: the script and its arguments.
        expected: "equal": each rank computes the losses of the real library. "refused CODE": it ends with this code.
            "own fault": it fails under the real library on a CPU, so that only our outcome is told. "differs": the real
            library computes another loss, which is not that of the model on one process.
        procs: numbers of processes.
        samples: of a data set that is drawn in place of a download.
        tolerance: largest relative difference of a loss.
        env: further variables.
        library: what Paceline is compared with: "deepspeed", "accelerate", or "torchrun" for plain PyTorch.
        inputs: functions of `inputs.py` that make data and models in the program's folder before it runs.
        weights: whether the tensors in the files that the program writes are compared too.
    """

    name: str
    repository: str
    folder: str
    command: tuple[str, ...]
    expected: str = "equal"
    procs: tuple[int, ...] = (1, 2)
    samples: int = 64
    tolerance: float = 1e-5
    env: dict[str, str] = field(default_factory=dict)
    library: str = "deepspeed"
    inputs: tuple[str, ...] = ()
    weights: bool = False


def example(name: str, folder: str, command: str, expected: str = "equal", **others: object) -> Program:
    """Returns a program of DeepSpeedExamples."""
    return Program(name, EXAMPLES, folder, tuple(command.split()), expected, **others)  # type: ignore[arg-type]


_BF16 = (
    "train.py --deepspeed_config configs/{}.json --num_layers 2 --hidden_dim 64 --num_heads 4 --vocab_size 500 "
    "--seq_length 32 --num_steps 6"
)


def other(name: str, where: str, command: str, **others: object) -> Program:
    """Returns a program of another repository; `where` is `owner/name` and its folder there."""
    owner, repository, folder = where.split("/", 2)
    return Program(name, f"{owner}/{repository}", folder, tuple(command.split()), **others)  # type: ignore[arg-type]


def plain(name: str, where: str, command: str, **others: object) -> Program:
    """Returns a program that torchrun starts, and whose saved weights are compared."""
    return other(name, where, command, library="torchrun", **{"weights": True, **others})


def hugging(name: str, where: str, command: str, *inputs: str, **others: object) -> Program:
    """Returns a program on accelerate."""
    return other(name, where, command, library="accelerate", inputs=inputs, **{"weights": True, **others})


_TRL = (
    "--model_name_or_path model --output_dir out --max_steps 4 --per_device_train_batch_size 2 --learning_rate 1e-2 "
    "--logging_steps 1 --report_to none --use_cpu --bf16 False --gradient_checkpointing False --eval_strategy no "
    "--save_strategy no --dataset_name "
)
_ENGINE = _TRL.replace("--save_strategy no", "--save_steps 2").replace("--use_cpu ", "")
_FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
_FSDP1 = {**_FSDP, "FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "FULL_SHARD", "FSDP_USE_ORIG_PARAMS": "true"}
_FSDP2 = {**_FSDP, "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
_SUPEROFFLOAD = (
    "finetune_zero3.py --deepspeed_config {}offload.json --model_name model --num_train_epochs 1 --lr 1e-5 --batch_size 4 "
    "--output_dir out --max_length 32 --bench_steps 4 --warmup_steps 1 --attn_implementation eager --activation_checkpointing"
)
_REWARDS = "--reward_funcs rewards.letters --num_generations 2 --max_completion_length 8 --beta 0.1 --seed 1"
_CHAT = (
    "--module training.{}.main --data_path local/jsonfile --data_split 4,3,3 --data_output_path data_files --seed 1 "
    "--gradient_accumulation_steps {} --lr_scheduler_type cosine --dtype bf16 --num_train_epochs 1 --output_dir out "
    "--deepspeed "
)
_CHAT_TUNED = _CHAT + (
    "--model_name_or_path model --per_device_train_batch_size 2 --per_device_eval_batch_size 2 --max_seq_len 24 "
    "--learning_rate 1e-3 --weight_decay 0.1 "
)
_CHAT_RLHF = _CHAT + (
    "--actor_model_name_or_path model --critic_model_name_or_path critic --per_device_generation_batch_size 2 "
    "--per_device_training_batch_size 2 --max_prompt_seq_len 12 --max_answer_seq_len 8 --actor_learning_rate 1e-3 "
    "--critic_learning_rate 1e-3 "
)
_OPENRLHF = (
    "--module openrlhf.cli.{} --model.model_name_or_path model --ds.attn_implementation eager --train.micro_batch_size 2 "
    "--train.batch_size 8 --train.seed 1 --train.max_epochs 2 --adam.lr 1e-3 --adam.weight_decay 0.1 --ckpt.output_dir out "
    "--ckpt.path out/checkpoints --ckpt.save_steps 3 --data.max_len 32 --data.max_samples 16 --ds.zero_stage {} "
)
_KOHYA = (
    "--pretrained_model_name_or_path sd15 --tokenizer_cache_dir cached --train_data_dir pictures --caption_extension .txt "
    "--resolution 64,64 --output_dir out --output_name one --max_train_steps 4 --train_batch_size 2 --seed 1 "
    "--gradient_accumulation_steps 2 --learning_rate 1e-3 --mixed_precision no --save_every_n_steps 2 "
    "--max_data_loader_n_workers 0 --save_model_as safetensors"
)
_KOHYA_LORA = "--network_module networks.lora --network_dim 2 --network_alpha 1"
_ANSWERS = "--data.dataset data/train.json --data.prompt_key prompt"
_INSTRUCTIONS = "--data.dataset instructions.json --data.input_key instruction --data.output_key output"
_NO_KERNELS = "flash_attn,flash_attn.bert_padding,flash_attn.utils,flash_attn.utils.distributed,pylatexenc"
_EXAMPLES = "pytorch/examples"
_SD = "--pretrained_model_name_or_path sd --seed 1"
_DIFFUSION = (
    "--resolution 64 --train_batch_size 2 --gradient_accumulation_steps 2 --max_train_steps 4 --learning_rate 1e-3 "
    "--checkpointing_steps 2 --dataloader_num_workers 0 --output_dir out"
)
_TUNE = (
    "device=cpu dtype=fp32 seed=1 output_dir=out tokenizer.path=model/tokenizer.model "
    "tokenizer.special_tokens_path=model/special.json model.vocab_size=272 model.num_layers=2 model.num_heads=4 "
    "model.num_kv_heads=2 model.embed_dim=32 model.max_seq_len=512 model.intermediate_dim=64 dataset.source=json "
    "dataset.data_files=instructions.json dataset.split=train dataset_val.source=json dataset_val.split=train "
    "dataset_val.data_files=instructions.json checkpointer.checkpoint_dir=model optimizer.fused=False "
    "batch_size=2 gradient_accumulation_steps=2 max_steps_per_epoch=2 log_peak_memory_stats=False"
)
_TUTORIALS = "PyTorchKorea/tutorials-kr"
_STEPS = (
    "--output_dir out --max_train_steps 4 --gradient_accumulation_steps 2 --per_device_train_batch_size 2 --seed 1 "
    "--per_device_eval_batch_size 2 --learning_rate 1e-3 --checkpointing_steps 2 "
)
_TRAINER = (
    "--do_train --do_eval --max_steps 4 --per_device_train_batch_size 2 --per_device_eval_batch_size 4 "
    "--gradient_accumulation_steps 2 --learning_rate 1e-2 --save_steps 2 --logging_steps 1 --output_dir out --report_to none"
)
_LINES = "--train_file train.txt --validation_file test.txt --block_size 16 --model_name_or_path model "


def _zero(stage: int) -> dict[str, str]:
    """Returns the variables by which `accelerate launch` asks for DeepSpeed."""
    return {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage),
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    }


def _wrapped(layer: str) -> dict[str, str]:
    """Returns the variables of FSDP 2 with units of one class; those of BERT's embeddings fail in the real library."""
    return {**_FSDP2, "FSDP_TRANSFORMER_CLS_TO_WRAP": layer}


def task(name: str, where: str, command: str, *inputs: str, **others: object) -> Program:
    """Returns a script of transformers' examples for one task, whose loop is its own."""
    row = {"env": {"PROGRAMS_BACKWARD": "1"}, **others}
    return hugging(f"task {name}", f"huggingface/transformers/examples/pytorch/{where}", _STEPS.join(command.split("|")),
                   *inputs, "task_files", **row)  # fmt: skip


def trainer(name: str, where: str, command: str, *inputs: str, **others: object) -> Program:
    """Returns a script of transformers' examples for one task, which `Trainer` trains."""
    row = {"procs": (1,), "env": {"PROGRAMS_BACKWARD": "1"}, **others}
    return hugging(f"trainer {name}", f"huggingface/transformers/examples/pytorch/{where}", f"{command} {_TRAINER}",
                   *inputs, "task_files", **row)  # fmt: skip


def rows(kind: str) -> str:
    """Returns the flags for the files of a task."""
    return f"--train_file train_{kind}.json --validation_file test_{kind}.json"


_GLUE = f"run_glue_no_trainer.py | --model_name_or_path bert {rows('pairs')}"
_QA = f"run_qa_no_trainer.py | --model_name_or_path bert --max_seq_length 24 --doc_stride 8 {rows('question')}"
_IMAGE_CLASSES = "run_image_classification_no_trainer.py | --model_name_or_path vit --dataset_name images"
_SUMMARIZATION = (
    "run_summarization_no_trainer.py | --model_name_or_path t5 --max_source_length 16 --max_target_length 8 "
    f"--num_beams 2 {rows('summary')}"
)

PROGRAMS = (
    *(
        example(f"cifar zero {stage} {dtype}", "training/cifar",
                f"cifar10_deepspeed.py --deepspeed --epochs 2 --dtype {dtype} --stage {stage}",
                tolerance=1e-5 if dtype == "fp32" else 2e-2)
        for stage, dtype in ((0, "fp32"), (1, "fp32"), (2, "bf16"), (3, "fp32"))
    ),
    example("cifar moe", "training/cifar",
            "cifar10_deepspeed.py --deepspeed --epochs 1 --dtype fp32 --moe --ep-world-size 2 --num-experts 2 --top-k 1 "
            "--noisy-gate-policy RSample --moe-param-group", "refused", procs=(2,)),
    example("gan", "training/gan",
            "gan_deepspeed_train.py --dataset cifar10 --workers 0 --batchSize 16 --imageSize 64 --ngf 8 --ndf 8 --epochs 2 "
            "--deepspeed_config gan_deepspeed_config.json"),
    example("pipeline base", "training/pipeline_parallelism",
            "train.py --deepspeed_config=ds_config.json -p 0 --steps=1 --backend gloo", samples=256,
            procs=(1,)),  # dropout: on several processes each library draws its own
    example("pipeline 2", "training/pipeline_parallelism",
            "train.py --deepspeed_config=ds_config.json -p 2 --steps=1 --backend gloo", samples=256, procs=(2,)),
    *(
        example(f"bf16_master_weight {config}", "training/bf16_master_weight", _BF16.format(config), tolerance=2e-2)
        for config in ("baseline", "bf16_full")
    ),
    example("offload_states", "training/offload_states",
            "offload_states.py --hidden_dim 64 --nlayers 2 --dtype torch.float32 --iteration 8",
            env={"PYTHONOPTIMIZE": "1"}),  # it asserts that memory of a device becomes free
    example("zenflow", "training/DeepSpeed-ZenFlow/benchmark",
            "zf_benchmark.py --hidden_dim 64 --iteration 6 --pin_memory_opts 0 --topk_ratios 0.1 --update_intervals 2 "
            "--overlap_steps 1", "refused", procs=(1,)),
    example("variable batch size", "training/data_efficiency/variable_batch_size_and_lr",
            "variable_batch_size_and_lr_example.py", "refused", procs=(2,)),
    example("imagenet", "training/imagenet",
            "main.py -a resnet18 --deepspeed --deepspeed_config config/ds_config.json --multiprocessing_distributed "
            "--dist-backend gloo -b 8 -j 0 --epochs 1 --print-freq 1 .", samples=32),
    *(
        example(f"autotp basic zero {stage}", "training/tensor_parallel/basic_example",
                f"autotp_example.py --model_name model --tp_size 2 --dp_size 1 --zero_stage {stage} --seq_length 32 "
                "--num_steps 4 --learning_rate 1e-2 --precision fp32", procs=(2,), inputs=("language_model",),
                env={"PROGRAMS_CUDA": "2"}, tolerance=2e-3)  # it differs from itself by 7e-4
        for stage in (0, 1, 2)
    ),
    example("autotp memory", "training/tensor_parallel/basic_example",
            "autotp_memory_compare.py --model_name model --tp_size 2 --dp_size 1 --zero_stage 1 --seq_length 32 --num_steps 4 "
            "--learning_rate 1e-2 --precision fp32 --mode traditional", procs=(2,), inputs=("language_model",),
            tolerance=2e-3),
    example("autotp patterns", "training/tensor_parallel/custom_patterns",
            "autotp_custom_patterns.py --model_name model --tp_size 2 --dp_size 1 --zero_stage 1 --seq_length 32 "
            "--num_steps 6 --learning_rate 1e-2 --precision fp32", "differs", procs=(2,), inputs=("gpt_neox",)),
    example("superoffload", "training/DeepSpeed-SuperOffload",
            _SUPEROFFLOAD.format("super"), procs=(1,), tolerance=2e-2,
            inputs=("language_model", "instructions", "superoffload"), env={"PROGRAMS_IDLE": "wandb"}),
    example("superoffload zero", "training/DeepSpeed-SuperOffload",
            _SUPEROFFLOAD.format("zero"), inputs=("language_model", "instructions", "superoffload"), tolerance=2e-2,
            env={"PROGRAMS_IDLE": "wandb"}),
    example("zenflow llama", "training/DeepSpeed-ZenFlow/finetuning",
            "finetune_llama.py --deepspeed_config zf_config.json --model_name model --num_train_epochs 1 --lr 2e-5 "
            "--batch_size 8 --output_dir out", "refused", procs=(1,), inputs=("language_model", "instructions")),
    example("vit random-ltd", "training/data_efficiency/vit_finetuning",
            "main_cifar.py --deepspeed_config config/ds_config_cifar_random_ltd.json --deepspeed --random_ltd --dataset "
            "cifar10vit224 --seed 1 --arch vits16r224 --lr 1e-4 --scheduler constant --epochs 1 --batchsize 32 --workers 0",
            "own fault", procs=(1,)),  # of timm 1.0
    example("gpt random-ltd", "training/data_efficiency/gpt_finetuning",
            "run_clm_no_trainer.py --deepspeed_config config/ds_config_gpt_base_random_ltd.json --deepspeed --random_ltd "
            "--dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 --model_name_or_path model "
            "--per_device_train_batch_size 2 --num_train_epochs 1 --block_size 16 --output_dir out", "refused", procs=(1,),
            inputs=("gpt2", "wikitext"), env={"PROGRAMS_OLDER": "1"}),
    example("gpt", "training/data_efficiency/gpt_finetuning",
            "run_clm_no_trainer.py --deepspeed_config ds_plain.json --deepspeed "
            "--dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 --model_name_or_path model "
            "--per_device_train_batch_size 2 --num_train_epochs 1 --block_size 16 --output_dir out", "own fault",
            inputs=("gpt2", "wikitext", "plain_config"),
            env={"PROGRAMS_OLDER": "1"}),  # it saves the vocabulary as tokenizers of transformers 4 did
    example("hello", "training/HelloDeepSpeed",
            "train_bert_ds.py --checkpoint_dir out --tokenizer model --num_layers 2 --ff_dim 64 --h_dim 32 --num_heads 4 "
            "--num_iterations 8 --checkpoint_every 4 --log_every 2", inputs=("language_model", "wikitext"), tolerance=2e-2),
    example("squad", "training/BingBertSquad",
            "nvidia_run_squad_deepspeed.py --bert_model bert --do_train --do_lower_case --train_file squad.json "
            "--train_batch_size 24 --gradient_accumulation_steps 8 --num_train_epochs 1 --max_seq_length 20 --doc_stride 8 "
            "--max_query_length 6 --output_dir out --deepspeed --deepspeed_config deepspeed_bsz24_config.json --preln "
            "--seed 1", "refused", procs=(1,), inputs=("bert_tasks",)),
    example("glue", "training/BingBertGlue",
            "run_glue_classifier_bert_base.py --task_name RTE --do_train --deepspeed --preln --deepspeed_config "
            "glue_bert_base.json --do_lower_case --data_dir glue --bert_model bert --max_seq_length 16 --train_batch_size 32 "
            "--gradient_accumulation_steps 32 --num_train_epochs 1 --output_dir out", "own fault", procs=(1,),
            inputs=("bert_tasks",)),  # it needs Apex
    *(
        example(f"trainer {config}", "training/tensor_parallel/hf_integration",
                "train.py --model_name_or_path model --data_path instructions.json --bf16 False --use_cpu --output_dir out "
                "--max_steps 4 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --eval_strategy no "
                "--save_strategy no --learning_rate 1e-2 --lr_scheduler_type cosine --logging_steps 1 --report_to none "
                f"--deepspeed {config}.json", expected, procs=procs, inputs=("language_model", "instructions",
                "trainer_configs"), tolerance=1e-4)
        for config, expected, procs in (("zero1", "equal", (1, 2)), ("zero2", "equal", (2,)), ("zero3", "equal", (1,)),
                                        ("tp", "equal", (2,)), ("zero1tp", "equal", (2,)))
    ),
    # DeepSpeed-Chat needs transformers 4: `--libraries` with it before the others.
    *(
        example(f"chat {name}", "applications/DeepSpeed-Chat", command, inputs=("language_model", "answers", "critic"),
                tolerance=2e-2, env={"PROGRAMS_OLDER": "1", "PROGRAMS_BACKWARD": "1"})
        for name, command in (
            ("sft zero 2", _CHAT_TUNED.format("step1_supervised_finetuning", 2) + "--zero_stage 2"),
            ("sft lora zero 3", _CHAT_TUNED.format("step1_supervised_finetuning", 2)
             + "--zero_stage 3 --lora_dim 4 --lora_module_name layers. --only_optimize_lora --gradient_checkpointing"),
            ("reward zero 2", _CHAT_TUNED.format("step2_reward_model_finetuning", 1) + "--zero_stage 2"),
            ("dpo zero 1", _CHAT_TUNED.format("step2_dpo_finetuning", 1) + "--zero_stage 1"),
        )
    ),
    # Losses of bf16, near 0: tokens, reference logits and rewards are equal, values within the last bit of bf16.
    *(
        example(f"chat rlhf zero {stage}", "applications/DeepSpeed-Chat",
                _CHAT_RLHF.format("step3_rlhf_finetuning", 1) + f"--actor_zero_stage {stage} --critic_zero_stage {stage}",
                expected, inputs=("language_model", "decided", "answers", "critic"),
                env={"PROGRAMS_OLDER": "1", "PROGRAMS_BACKWARD": "1"}, procs=(2,))
        # DeepSpeed's stage 3 takes no model in two dtypes, such as the program's critic.
        for stage, expected in ((2, "differs"), (3, "own fault"))
    ),
    example("moq", "training/MoQ", "run_glue.py --model_name_or_path model --task_name mrpc --do_train --output_dir out",
            "own fault", procs=(1,)),
    example("domino", "training/DeepSpeed-Domino", "pretrain_gpt.py", "own fault", procs=(1,)),
    example("bing_bert", "training/bing_bert",
            "deepspeed_train.py --cf bert_large_lamb_nvidia_data.json --max_seq_length 128 --output_dir out --deepspeed "
            "--deepspeed_config deepspeed_bsz64k_lamb_config_seq128.json --data_path_prefix . --use_nvidia_dataset",
            "own fault", procs=(1,), env={"PROGRAMS_IDLE": "tensorboardX,h5py"}),  # it downloads its vocabulary
    plain("nanogpt", "karpathy/nanoGPT/.",
          "train.py --device=cpu --compile=False --dtype=float32 --backend=gloo --dataset=tiny --n_layer=2 --n_head=2 "
          "--n_embd=32 --block_size=16 --batch_size=4 --gradient_accumulation_steps=4 --max_iters=6 --lr_decay_iters=6 "
          "--warmup_iters=2 --eval_interval=3 --eval_iters=2 --log_interval=1", inputs=("characters",)),
    plain("mnist", f"{_EXAMPLES}/mnist", "main.py --epochs 1 --no-accel --save-model --batch-size 8", procs=(1,)),
    plain("imagenet, torchrun", f"{_EXAMPLES}/imagenet",
          "main.py -a resnet18 --dist-url env:// --dist-backend gloo -b 8 -j 0 --epochs 1 --print-freq 1 .", samples=32,
          weights=False),  # on a CPU it leaves DDP out, and both ranks write one file
    plain("ddp series", f"{_EXAMPLES}/distributed/ddp-tutorial-series", "multigpu_torchrun.py 2 1", procs=(1, 2)),
    plain("ddp", f"{_EXAMPLES}/distributed/ddp", "example.py", procs=(2,), weights=False,
          env={"PROGRAMS_ACCELERATOR": "cpu"}),
    plain("fsdp2", f"{_EXAMPLES}/distributed/FSDP2", "example.py", procs=(2,), weights=False,
          env={"PROGRAMS_ACCELERATOR": "cpu", "PROGRAMS_BACKWARD": "1"}),
    plain("tp", f"{_EXAMPLES}/distributed/tensor_parallelism", "tensor_parallel_example.py", procs=(2,), weights=False,
          env={"PROGRAMS_ACCELERATOR": "cpu", "PROGRAMS_BACKWARD": "1"}),
    plain("sp", f"{_EXAMPLES}/distributed/tensor_parallelism", "sequence_parallel_example.py", procs=(2,), weights=False,
          env={"PROGRAMS_ACCELERATOR": "cpu", "PROGRAMS_BACKWARD": "1"}),
    plain("mingpt", f"{_EXAMPLES}/distributed/minGPT-ddp/mingpt",
          "main.py data_config.path=input.txt data_config.truncate=1 data_config.block_size=16 gpt_config.n_layer=2 "
          "gpt_config.n_head=2 gpt_config.n_embd=32 trainer_config.max_epochs=1 trainer_config.batch_size=64 "
          "trainer_config.data_loader_workers=0 trainer_config.use_amp=False", inputs=("text",),
          env={"PROGRAMS_ACCELERATOR": "cpu"}),
    plain("timm", "huggingface/pytorch-image-models/.",
          "train.py images --device cpu --model resnet18 --num-classes 2 --img-size 32 -b 4 -j 1 --epochs 2 --lr 0.01 "
          "--log-interval 1 --seed 0 --output out --experiment one", inputs=("images",),
          env={"PROGRAMS_BACKWARD": "1"}),
    hugging("trl sft", "huggingface/trl/trl/scripts", f"sft.py {_TRL}chats", "language_model", "chats",
            env={"PROGRAMS_BACKWARD": "1"}),
    task("glue", "text-classification", _GLUE, "bert"),
    task("clm", "language-modeling", f"run_clm_no_trainer.py | {_LINES}", "gpt2",
         expected="own fault"),  # it and two others name DistributedType.TPU, which accelerate 1.15 does not have
    task("mlm", "language-modeling",
         "run_mlm_no_trainer.py | --train_file train.txt --validation_file test.txt --max_seq_length 16 "
         "--model_name_or_path bert", "bert", expected="own fault"),
    task("fim", "language-modeling", f"run_fim_no_trainer.py | {_LINES}", "gpt2", expected="own fault"),
    task("swag", "multiple-choice", f"run_swag_no_trainer.py | --model_name_or_path bert {rows('choice')}", "bert"),
    task("qa", "question-answering", _QA, "bert"),
    task("ner", "token-classification", f"run_ner_no_trainer.py | --model_name_or_path bert {rows('words')}", "bert"),
    task("summarization", "summarization", _SUMMARIZATION, "t5"),
    task("translation", "translation",
         "run_translation_no_trainer.py | --model_name_or_path t5 --max_source_length 16 --max_target_length 8 "
         f"--num_beams 2 --source_lang en --target_lang de {rows('translation')}", "t5"),
    task("image classes", "image-classification", _IMAGE_CLASSES, "vit", "images"),
    task("mim", "image-pretraining",
         "run_mim_no_trainer.py | --model_name_or_path vit --dataset_name images --mask_patch_size 16",
         "vit", "images", expected="own fault"),
    task("semantic", "semantic-segmentation",
         "run_semantic_segmentation_no_trainer.py | --model_name_or_path segformer --dataset_name masks",
         "segformer", "masks"),
    hugging("trl grpo", "huggingface/trl/trl/scripts",
            f"grpo.py {_TRL}questions --reward_funcs rewards.letters --num_generations 2 --max_completion_length 8 "
            "--beta 0.1 --seed 1", "language_model", "questions", env={"PROGRAMS_BACKWARD": "1"}),
    hugging("open-r1 sft", "huggingface/open-r1/src/open_r1", f"sft.py {_TRL}chats", "language_model", "chats",
            expected="own fault", procs=(1,)),  # it imports a name that trl 1.16 does not have
    *(
        hugging(f"trl {name}", f"huggingface/trl/{folder}", f"{name}.py {_TRL}{data}", "language_model", data,
                env={"PROGRAMS_BACKWARD": "1"})
        for name, folder, data in (
            ("dpo", "trl/scripts", "preferences"), ("kto", "trl/scripts", "judgements"),
            ("reward", "trl/scripts", "preferences"),
            ("orpo", "examples/scripts", "preferences"), ("cpo", "examples/scripts", "preferences"),
        )
    ),
    plain("vision", "pytorch/vision/references/classification",
          "train.py --device cpu --data-path images --model resnet18 --train-crop-size 32 --val-resize-size 36 "
          "--val-crop-size 32 -b 4 -j 0 --epochs 2 --lr 0.01 --model-ema --model-ema-steps 2 --lr-warmup-epochs 1 "
          "--label-smoothing 0.1 --mixup-alpha 0.2 --output-dir out", samples=24, inputs=("image_folders",)),
    plain("ddp tutorial", f"{_TUTORIALS}/intermediate_source", "ddp_tutorial_6.py", procs=(2,), inputs=("tutorial",),
          env={"PROGRAMS_CUDA": "2", "PROGRAMS_BACKWARD": "1"}, weights=False),
    plain("nanochat", "karpathy/nanochat/.",
          "-m scripts.base_train --device-type cpu --depth 2 --aspect-ratio 16 --head-dim 16 --max-seq-len 64 "
          "--device-batch-size 2 --total-batch-size 512 --num-iterations 4 --eval-every 2 --eval-tokens 512 "
          "--core-metric-every -1 --sample-every -1 --window-pattern L", inputs=("nanochat",), procs=(1,),
          env={"NANOCHAT_BASE_DIR": "base", "TORCHDYNAMO_DISABLE": "1", "PROGRAMS_BACKWARD": "1"}),
    plain("pipelining tutorial", f"{_TUTORIALS}/intermediate_source", "pipelining_tutorial.py", procs=(2,),
          inputs=("tutorial",), weights=False),
    *(
        hugging(f"diffusers {name}", f"huggingface/diffusers/examples/{folder}", f"{command} {_DIFFUSION} {more}",
                "diffusion", env={"PROGRAMS_BACKWARD": "1"})
        for name, folder, command, more in (
            ("text_to_image", "text_to_image", "train_text_to_image.py", f"{_SD} --dataset_name captions --use_ema"),
            ("lora", "text_to_image", "train_text_to_image_lora.py", f"{_SD} --dataset_name captions --rank 2"),
            ("controlnet", "controlnet", "train_controlnet.py", f"{_SD} --dataset_name conditions"),
            ("dreambooth", "dreambooth", "train_dreambooth.py",
             f"{_SD} --instance_data_dir things --instance_prompt w1"),
        )
    ),
    hugging("diffusers unconditional", "huggingface/diffusers/examples/unconditional_image_generation",
            "train_unconditional.py --train_data_dir things --model_config_name_or_path unet --resolution 16 "
            "--train_batch_size 2 --num_epochs 2 --gradient_accumulation_steps 2 --learning_rate 1e-3 --use_ema "
            "--checkpointing_steps 2 --dataloader_num_workers 0 --output_dir out --logger tensorboard "
            "--save_images_epochs 10 --ddpm_num_inference_steps 2", "unconditional", env={"PROGRAMS_BACKWARD": "1"}),
    hugging("peft dreambooth", "huggingface/peft/examples/lora_dreambooth",
            f"train_dreambooth.py {_SD} --instance_data_dir things --instance_prompt w1 --resolution 64 --use_lora --lora_r 2 "
            "--train_batch_size 2 --max_train_steps 4 --gradient_accumulation_steps 2 --learning_rate 1e-3 "
            "--num_dataloader_workers 0 --no_tracemalloc --output_dir out", "diffusion", env={"PROGRAMS_BACKWARD": "1"}),
    hugging("lerobot act", "huggingface/lerobot/src",
            "-m lerobot.scripts.lerobot_train --dataset.repo_id robot --dataset.root robot --policy.type act "
            "--policy.device cpu --policy.push_to_hub false --policy.dim_model 16 --policy.n_heads 2 "
            "--policy.dim_feedforward 16 --policy.n_encoder_layers 1 --policy.n_vae_encoder_layers 1 "
            "--policy.latent_dim 4 --policy.chunk_size 4 --policy.n_action_steps 4 --batch_size 4 --steps 6 "
            "--save_freq 3 --log_freq 1 --eval_freq 0 --num_workers 0 --seed 1 --wandb.enable false --output_dir out",
            "robot", env={"PROGRAMS_BACKWARD": "1"}),
    plain("torchtune", "pytorch/torchtune/recipes",
          f"full_finetune_distributed.py --config configs/llama3_2/1B_full.yaml {_TUNE} "
          "model._component_=torchtune.models.llama3_2.llama3_2",
          inputs=("llama3_2", "instructions"), procs=(2,), env={"PROGRAMS_BACKWARD": "1"}),
    task("boxes", "object-detection",
         "run_object_detection_no_trainer.py | --model_name_or_path yolos --dataset_name boxes --image_square_size 64 "
         "--ignore_mismatched_sizes", "boxes"),
    task("instances", "instance-segmentation",
         "run_instance_segmentation_no_trainer.py | --model_name_or_path mask2former --dataset_name instances "
         "--image_height 64 --image_width 64 --do_reduce_labels", "instances",
         expected="own fault"),  # DDP refuses the last layer norm of its backbone, which no loss depends on
    hugging("diffusers textual_inversion", "huggingface/diffusers/examples/textual_inversion",
            f"textual_inversion.py {_SD} --train_data_dir things --placeholder_token ~~ --initializer_token w --repeats 4 "
            f"{_DIFFUSION} --save_steps 2", "diffusion", env={"PROGRAMS_BACKWARD": "1"}),
    hugging("lighteval", "huggingface/lighteval/src",
            "-m lighteval accelerate model_name=model,batch_size=2,dtype=float32 drawn|0 --custom-tasks questions.py "
            "--output-dir out", "language_model", "choices", procs=(2,), weights=False),
    hugging("ms-swift sft", "modelscope/ms-swift/.",
            "swift/cli/sft.py --model model --model_type llama --template chatml --dataset chats/train.jsonl "
            "--tuner_type full --torch_dtype float32 --max_steps 4 --per_device_train_batch_size 2 "
            "--gradient_accumulation_steps 2 --learning_rate 1e-2 --logging_steps 1 --report_to none "
            "--split_dataset_ratio 0 --output_dir out --add_version false --save_steps 2 --dataset_num_proc 1 "
            "--dataloader_num_workers 0 --gradient_checkpointing false --use_cpu true", "language_model", "chats",
            env={"PROGRAMS_BACKWARD": "1", "USE_HF": "1", "PYTORCH_JIT": "0"}),  # it compiles what the shim replaces
    *(
        hugging(name, "axolotl-ai-cloud/axolotl/src", "-m axolotl.cli.train axolotl.yaml", "language_model", "chats", "axolotl",
                expected=expected, procs=procs, env={"PROGRAMS_BACKWARD": "1", "AXOLOTL_DO_NOT_TRACK": "1",
                "PROGRAMS_IDLE": "wandb", "PYTORCH_JIT": "0"})
        # On several processes it puts the model on the GPU with the number of the rank.
        for name, expected, procs in (("axolotl", "equal", (1,)), ("axolotl 2", "own fault", (2,)))
    ),
    hugging("trl rloo", "huggingface/trl/trl/scripts",
            f"rloo.py {_TRL}questions --reward_funcs rewards.letters --num_generations 2 --max_completion_length 8 "
            "--beta 0.1 --seed 1", "language_model", "questions", procs=(2,), env={"PROGRAMS_BACKWARD": "1"}),
    *(
        hugging(f"accelerate {script} {more}".strip(), "huggingface/accelerate/examples/by_feature",
                f"{script}.py --cpu {more}", "accelerate_examples", procs=procs, weights=script == "checkpointing",
                env={"PROGRAMS_BACKWARD": "1"})
        for script, more, procs in (
            ("automatic_gradient_accumulation", "", (2,)),
            ("checkpointing", "--checkpointing_steps epoch --output_dir out", (2,)),
            ("checkpointing", "--checkpointing_steps 4 --output_dir out --use_stateful_dataloader", (2,)),
            ("cross_validation", "", (2,)),
            ("ddp_comm_hook", "--ddp_comm_hook power_sgd --ddp_comm_wrapper fp16", (2,)),
            ("early_stopping", "", (2,)),
            ("gradient_accumulation", "--gradient_accumulation_steps 4", (1, 2)),
            ("gradient_accumulation_for_autoregressive_models",
             "--gradient_accumulation_steps 3 --per_device_batch_size 16", (1,)),
            ("local_sgd", "--gradient_accumulation_steps 2 --local_sgd_steps 4", (2,)),
            ("memory", "", (2,)),
        )
    ),
    hugging("accelerate nlp_example", "huggingface/accelerate/examples", "nlp_example.py --cpu", "accelerate_examples",
            weights=False, env={"PROGRAMS_BACKWARD": "1"}),
    hugging("accelerate complete_nlp_example", "huggingface/accelerate/examples",
            "complete_nlp_example.py --cpu --checkpointing_steps epoch --output_dir out --with_tracking --project_dir out",
            "accelerate_examples", procs=(1,), env={"PROGRAMS_BACKWARD": "1"}),
    hugging("accelerate ddp_comm_hook bf16", "huggingface/accelerate/examples/by_feature",
            "ddp_comm_hook.py --cpu --ddp_comm_hook bf16", "accelerate_examples", procs=(2,), weights=False,
            env={"PROGRAMS_BACKWARD": "1"}, expected="own fault"),  # torch has this hook for NCCL alone
    hugging("accelerate fsdp_with_peak_mem_tracking", "huggingface/accelerate/examples/by_feature",
            "fsdp_with_peak_mem_tracking.py --model_name_or_path bert-base-cased --checkpointing_steps epoch --output_dir out",
            "accelerate_examples", procs=(2,), env={"PROGRAMS_BACKWARD": "1", "ACCELERATE_USE_FSDP": "true",
            "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"},
            expected="own fault"),  # it measures the memory of a GPU
    hugging("accelerate megatron_lm", "huggingface/accelerate/examples/by_feature",
            "megatron_lm_gpt_pretraining.py --dataset_name Salesforce/wikitext --dataset_config_name wikitext-2-v1 "
            "--model_name_or_path HuggingFaceTB/SmolLM-360M --block_size 16 --num_train_epochs 1 --output_dir out",
            "accelerate_examples", procs=(1,), expected="own fault"),  # it imports a name that transformers 5 does not have
    *(
        hugging(f"accelerate nd_parallel {axis}", "huggingface/accelerate/examples/torch_native_parallelism",
                f"nd_parallel.py --model-name HuggingFaceTB/SmolLM-360M --save-dir out --num-steps 6 "
                f"--checkpoint-frequency 2 --sequence-length 32 --{axis}-size 2",
                "accelerate_examples", procs=(2,), env={"PROGRAMS_BACKWARD": "1", "PROGRAMS_IDLE": "wandb",
                "PROGRAMS_ACCELERATOR": "cpu"}, expected=expected)
        # The real library has no such sizes on a CPU. The model of the second was divided by transformers.
        for axis, expected in (("dp-shard", "own fault"), ("tp", "refused"))
    ),
    hugging("accelerate phi2", "huggingface/accelerate/examples/inference/distributed", "phi2.py", "accelerate_examples",
            weights=False, procs=(1,), env={"PROGRAMS_GENERATED": "1"}),
    trainer("summarization", "summarization",
            "run_summarization.py --model_name_or_path t5 --max_source_length 16 --max_target_length 8 --num_beams 2 "
            f"--predict_with_generate {rows('summary')}", "t5"),
    trainer("qa", "question-answering",
            f"run_qa.py --model_name_or_path bert --max_seq_length 24 --doc_stride 8 {rows('question')}", "bert"),
    hugging("trl online_dpo", "huggingface/trl/examples/scripts",
            f"online_dpo.py {_TRL}prompts --reward_model_path model --max_new_tokens 6 --seed 1", "language_model", "prompts",
            procs=(1,), expected="own fault"),  # it writes a dtype as JSON
    *(
        hugging(f"trl {name} {kind}".strip(), f"huggingface/trl/{folder}", f"{name}.py {_ENGINE}{data} {more}",
                "language_model", data, procs=(2,), expected=expected, env={"PROGRAMS_BACKWARD": "1", **env})
        for name, folder, data, kind, more, env, expected in (
            ("gkd", "examples/scripts", "chats", "",
             "--use_cpu --teacher_model_name_or_path model --max_new_tokens 6 --seed 1", {}, "equal"),
            ("sft", "trl/scripts", "chats", "peft", "--use_cpu --use_peft --lora_r 2 --gradient_accumulation_steps 2", {},
             "equal"),
            # torch's FSDP 1 crashes where it gathers the weights for a file.
            ("sft", "trl/scripts", "chats", "fsdp1", "--gradient_accumulation_steps 2", _FSDP1, "own fault"),
            ("sft", "trl/scripts", "chats", "fsdp2", "--gradient_accumulation_steps 2", _FSDP2, "equal"),
            ("sft", "trl/scripts", "chats", "zero 3", "--gradient_accumulation_steps 2", _zero(3), "equal"),
        )
    ),
    *(
        hugging(f"peft sft{kind}", "huggingface/peft/examples/sft",
                f"train.py {_ENGINE}sentences --use_peft_lora --lora_r 2 --lora_alpha 4 {more}", "language_model", "sentences",
                procs=(2,), env={"PROGRAMS_BACKWARD": "1", **env})
        for kind, more, env in (("", "--use_cpu", {}), (" fsdp2", "", _FSDP2), (" zero 3", "", _zero(3)))
    ),
    *(
        hugging(f"peft {name} zero 3", f"huggingface/peft/examples/{folder}", f"{script}_accelerate_ds_zero3_offload.py", model,
                "tweets", procs=(2,), env={"PROGRAMS_BACKWARD": "1", "PROGRAMS_GENERATED": "1", "PROGRAMS_ACCELERATOR": "cpu",
                **_zero(3)})
        for name, folder, script, model in (
            ("clm", "causal_language_modeling", "peft_lora_clm", "language_model"),
            ("lora seq2seq", "conditional_generation", "peft_lora_seq2seq", "t5"),
        )
    ),
    hugging("accelerate deepspeed_with_config_support", "huggingface/accelerate/examples/by_feature",
            "deepspeed_with_config_support.py --dataset_name Salesforce/wikitext --dataset_config_name wikitext-2-v1 "
            "--model_name_or_path HuggingFaceTB/SmolLM-360M --block_size 16 --num_train_epochs 1 --output_dir out "
            "--learning_rate 1e-3 --seed 1 --gradient_accumulation_steps 2 --checkpointing_steps epoch --load_best_model",
            "accelerate_examples", "zero_2_template", procs=(2,), env={"PROGRAMS_BACKWARD": "1",
            "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "zero2.json"}),
    hugging("sentence-transformers sts", "huggingface/sentence-transformers/examples/sentence_transformer/training/sts",
            "training_stsbenchmark.py", "bert", "similar", procs=(2,), env={"PROGRAMS_BACKWARD": "1"}),
    hugging("diffusers vqgan", "huggingface/diffusers/examples/vqgan",
            "train_vqgan.py --model_config_name_or_path vq.json --discriminator_config_name_or_path critic.json "
            "--train_data_dir captions/train --seed 1 --discr_learning_rate 1e-3 --timm_model_backend resnet10t "
            f"--timm_model_layers layer1|layer2 --timm_model_offset 3 {_DIFFUSION}", "diffusion", "vqgan", procs=(1,),
            env={"PROGRAMS_BACKWARD": "1"}),
    *(
        hugging(f"trl {name} {kind}", "huggingface/trl/trl/scripts", f"{name}.py {_ENGINE}{data} {more}", "language_model",
                data, procs=(2,), env={"PROGRAMS_BACKWARD": "1", **env}, tolerance=tolerance)
        for name, data, kind, more, env, tolerance in (
            ("dpo", "preferences", "fsdp2", "", _FSDP2, 1e-5),
            ("dpo", "preferences", "zero 3", "", _zero(3), 1e-4),  # Adam divides two tiny gradients by their own sizes
            ("grpo", "questions", "fsdp2", _REWARDS, _FSDP2, 1e-5),
            ("grpo", "questions", "zero 3", _REWARDS, _zero(3), 1e-5),
            ("reward", "preferences", "fsdp2", "", _FSDP2, 1e-5),
            ("reward", "preferences", "zero 2", "", _zero(2), 1e-5),
            ("kto", "judgements", "fsdp2", "", _FSDP2, 1e-5),
            ("kto", "judgements", "zero 2", "", _zero(2), 1e-5),
            ("sft", "chats", "packing", "--use_cpu --packing --max_length 32", {}, 1e-5),
            ("sft", "chats", "peft fsdp2", "--use_peft --lora_r 2", _FSDP2, 1e-5),
            ("sft", "chats", "peft zero 3", "--use_peft --lora_r 2", _zero(3), 1e-5),
        )
    ),
    *(
        task(f"{name} {kind}", folder, command, *inputs, procs=(2,), expected=expected, weights=weights,
             env={"PROGRAMS_BACKWARD": "1", **env})
        for name, folder, command, inputs, kind, env, expected, weights in (
            ("glue", "text-classification", _GLUE, ("bert",), "zero 2", _zero(2), "equal", True),
            ("glue", "text-classification", _GLUE, ("bert",), "zero 2 windows",
             {**_zero(2), "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}, "equal", True),
            # safetensors cannot write the DTensors with which these scripts end under FSDP 2; all losses come before.
            ("glue", "text-classification", _GLUE, ("bert",), "fsdp2", _wrapped("BertLayer"), "own fault", False),
            ("qa", "question-answering", _QA, ("bert",), "fsdp2", _wrapped("BertLayer"), "own fault", False),
            ("image classes", "image-classification", _IMAGE_CLASSES, ("vit", "images"), "fsdp2", _wrapped("ViTLayer"),
             "own fault", False),
            # Two biases get no gradient but rounding, which Adam makes large.
            ("qa", "question-answering", _QA, ("bert",), "zero 3", _zero(3), "equal", False),
            ("image classes", "image-classification", _IMAGE_CLASSES, ("vit", "images"), "zero 3", _zero(3), "equal", True),
            ("summarization", "summarization", _SUMMARIZATION, ("t5",), "zero 2", _zero(2), "equal", True),
            # The real library draws other random numbers while it loads T5 under ZeRO 3, and so has other losses than under 2.
            ("summarization", "summarization", _SUMMARIZATION, ("t5",), "zero 3", _zero(3), "differs", False),
        )
    ),
    *(
        task(f"glue {kind} bf16", "text-classification", _GLUE, "bert", procs=(2,), expected=expected, tolerance=2e-2,
             weights=expected == "equal", env={"PROGRAMS_BACKWARD": "1", "ACCELERATE_MIXED_PRECISION": "bf16", **env})
        for kind, env, expected in (("zero 2", _zero(2), "equal"), ("fsdp2", _wrapped("BertLayer"), "own fault"))
    ),
    *(
        hugging(f"accelerate {script} {kind}", "huggingface/accelerate/examples/by_feature", f"{script}.py {more}",
                "accelerate_examples", procs=(2,), weights=False, env={"PROGRAMS_BACKWARD": "1", **env})
        for script, more, kind, env in (
            ("gradient_accumulation", "--gradient_accumulation_steps 4", "fsdp2", _wrapped("BertLayer")),
            ("gradient_accumulation", "--gradient_accumulation_steps 4", "zero 2", _zero(2)),
            ("checkpointing", "--checkpointing_steps 4 --output_dir out", "zero 2", _zero(2)),
            ("early_stopping", "", "fsdp2", _wrapped("BertLayer")),
            ("early_stopping", "", "zero 2", _zero(2)),
            ("automatic_gradient_accumulation", "", "zero 2", _zero(2)),
        )
    ),
    *(
        hugging(f"accelerate {script} {more}".strip(), "huggingface/accelerate/examples/by_feature",
                f"{script}.py --cpu {more}", "accelerate_examples", procs=(2,), weights=False,
                env={"PROGRAMS_BACKWARD": "1"})
        for script, more in (
            ("multi_process_metrics", ""),
            ("profiler", "--record_shapes --profile_memory --with_flops --output_trace_dir out"),
            ("schedule_free", ""),
            ("tracking", "--with_tracking --project_dir out"),
            ("local_sgd", "--gradient_accumulation_steps 1 --local_sgd_steps 3"),
        )
    ),
    *(
        hugging(f"peft {name}", f"huggingface/peft/examples/{name}_finetuning",
                f"{name}_finetuning.py --base_model_name_or_path model {more} --bits fp32 --bf16 False "
                "--data_path tatsu-lab/alpaca --dataset_split train --dataset_field instruction output --output_dir out "
                "--max_steps 4 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-2 "
                "--logging_steps 1 --report_to none --use_cpu --gradient_checkpointing False --max_length 32 --save_steps 2",
                "language_model", "instructions", procs=(2,), env={"PROGRAMS_BACKWARD": "1"})
        for name, more in (("miss", "--miss_r 4"), ("pissa", "--init_lora_weights pissa --lora_r 4 --lora_alpha 4"))
    ),
    # Without original parameters FSDP 1 of the real library trains none of the adapter; with them it saves none.
    hugging("peft seq2seq fsdp1", "huggingface/peft/examples/conditional_generation", "peft_lora_seq2seq_accelerate_fsdp.py",
            "t5", "phrases", procs=(2,), weights=False, env={"PROGRAMS_BACKWARD": "1", "ACCELERATE_USE_FSDP": "true",
            "FSDP_USE_ORIG_PARAMS": "true"}),
    hugging("peft p_tuning", "huggingface/peft/examples/sequence_classification",
            "peft_no_lora_accelerate.py --model_name_or_path bert-base-cased --num_virtual_tokens 4 --peft_type p_tuning "
            "--encoder_hidden_size 16 --num_train_epochs 1 --output_dir out --seed 1", "accelerate_examples", procs=(2,),
            env={"PROGRAMS_BACKWARD": "1"}),
    hugging("diffusers instruct_pix2pix", "huggingface/diffusers/examples/instruct_pix2pix",
            f"train_instruct_pix2pix.py {_SD} --dataset_name edits --original_image_column image --edited_image_column "
            f"edited_image --edit_prompt_column text --use_ema {_DIFFUSION}", "diffusion", procs=(2,),
            env={"PROGRAMS_BACKWARD": "1"}),
    # It saves on one process, where DeepSpeed needs all: the real library waits for ever, and Paceline says so.
    hugging("diffusers text_to_image zero 2", "huggingface/diffusers/examples/text_to_image",
            f"train_text_to_image.py {_SD} --dataset_name captions --use_ema {_DIFFUSION}", "diffusion", procs=(2,),
            expected="refused", env={"PROGRAMS_BACKWARD": "1", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2", **_zero(2)}),
    *(
        hugging(f"peft {name}", f"huggingface/peft/examples/{name}_finetuning",
                f"{name}_finetuning.py --base_model model --data_path tatsu-lab/alpaca --output_dir out --batch_size 4 "
                "--num_epochs 2 --learning_rate 1e-2 --cutoff_len 32 --val_set_size 4 --eval_step 2 --save_step 2 "
                f"--device_map cpu --dtype float32 --seed 1 --{name}_r 2",
                "language_model", "instructions", procs=(2,), env={"PROGRAMS_BACKWARD": "1"})
        for name in ("shira", "hira", "glora")
    ),
    *(
        hugging(f"peft {kind}", "huggingface/peft/examples/sequence_classification",
                f"peft_no_lora_accelerate.py --model_name_or_path bert-base-cased --num_virtual_tokens 4 --peft_type {kind} "
                "--encoder_hidden_size 16 --num_train_epochs 1 --output_dir out --seed 1", "accelerate_examples", procs=(2,),
                env={"PROGRAMS_BACKWARD": "1"})
        for kind in ("prefix_tuning", "prompt_tuning")
    ),
    *(
        hugging(f"trl {name}", "huggingface/trl/examples/scripts", f"{name}.py {_TRL}{data} {more}", "language_model", data,
                procs=(2,), env={"PROGRAMS_BACKWARD": "1"})
        for name, data, more in (
            ("tpo", "triples", ""),
            ("reward_modeling", "preferences", "--use_peft --lora_task_type SEQ_CLS --lora_r 2"),
        )
    ),
    # It prepares the layers and calls the model that they are a part of, so that DDP averages nothing and ranks drift apart.
    hugging("diffusers custom_diffusion", "huggingface/diffusers/examples/custom_diffusion",
            f"train_custom_diffusion.py {_SD} --instance_data_dir things --instance_prompt w1 --modifier_token ~~ "
            f"--initializer_token w --noaug {_DIFFUSION}", "diffusion", procs=(2,), env={"PROGRAMS_BACKWARD": "1"},
            expected="differs", weights=False),
    # It needs bf16 or fp16, and transformers 5.15.
    *(
        other(f"openrlhf {name} zero {stage}", "OpenRLHF/OpenRLHF/.",
              f"{_OPENRLHF.format(f'train_{kind}', stage)} {data} {more}", inputs=("language_model", "instructions", "answers"),
              procs=procs, tolerance=2e-2, weights=True, env={"PROGRAMS_BACKWARD": "1", "PROGRAMS_IDLE": _NO_KERNELS})
        # With LoRA at stage 3 its rank 0 saves alone what all ranks divide: DeepSpeed writes empty tensors, and Paceline waits
        # for the others until its time is over.
        for name, kind, stage, procs, data, more in (
            ("sft", "sft", 2, (1, 2), _INSTRUCTIONS, ""),
            ("sft", "sft", 3, (1, 2), _INSTRUCTIONS, "--eval.dataset instructions.json --eval.steps 2"),
            ("sft lora", "sft", 2, (1, 2), _INSTRUCTIONS, "--ds.lora.rank 2"),
            ("sft tp", "sft", 2, (2,), _INSTRUCTIONS, "--ds.tensor_parallel_size 2"),
            ("sft offload", "sft", 2, (2,), _INSTRUCTIONS, "--ds.adam_offload"),
            ("sft fp16", "sft", 3, (2,), _INSTRUCTIONS, "--ds.param_dtype fp16"),
            ("dpo", "dpo", 3, (1, 2), _ANSWERS, "--ref.model_name_or_path model"),
            ("rm muon", "rm", 2, (1, 2), _ANSWERS, "--optim muon --model.gradient_checkpointing_enable "
             "--eval.dataset data/eval.json --eval.split train"),
        )
    ),
    # It asserts that there is a GPU.
    hugging("fast-DiT", "chuanyangjin/fast-DiT/.",
            "train.py --model DiT-S/8 --num-classes 10 --epochs 2 --global-batch-size 8 --num-workers 0 --log-every 2 "
            "--ckpt-every 3", "diffusion", "latents", procs=(2,), env={"PROGRAMS_BACKWARD": "1", "PYTHONOPTIMIZE": "1"}),
    hugging("denoising-diffusion", "lucidrains/denoising-diffusion-pytorch/.", "train.py", "denoising",
            env={"PROGRAMS_BACKWARD": "1"}),
    hugging("peft semantic search", "huggingface/peft/examples/feature_extraction",
            "peft_lora_embedding_semantic_search.py --model_name_or_path bert --dataset_name products --output_dir out "
            "--per_device_train_batch_size 4 --per_device_eval_batch_size 8 --num_train_epochs 2 --learning_rate 1e-2 --seed 1 "
            "--gradient_accumulation_steps 2 --checkpointing_steps 3 --use_peft", "bert", "products",
            env={"PROGRAMS_BACKWARD": "1"}),
    hugging("trl ppo", "huggingface/trl/examples/scripts/ppo",
            "ppo.py --model_name_or_path model --sft_model_path model --reward_model_path model --output_dir out "
            "--dataset_name openings --dataset_train_split train --total_episodes 16 --per_device_train_batch_size 2 "
            "--num_ppo_epochs 2 "
            "--gradient_accumulation_steps 2 --num_mini_batches 2 --response_length 6 --local_rollout_forward_batch_size 2 "
            "--learning_rate 1e-3 --missing_eos_penalty 1.0 --stop_token eos --num_sample_generations 0 --save_strategy no "
            "--report_to none --use_cpu --bf16 False --seed 1", "language_model", "openings", procs=(2,),
            env={"PROGRAMS_BACKWARD": "1"}, expected="own fault"),  # transformers 5.24 reads an attribute that it has not set
    *(
        hugging(f"accelerate pippy {name}", "huggingface/accelerate/examples/inference/pippy", f"{name}.py",
                "pipelined", procs=(2,), weights=False, env={"PROGRAMS_STACK": "1"}, expected="own fault")
        # torch sends a tensor that gloo does not take, and cannot trace GPT-2 of transformers 5.
        for name in ("bert", "gpt2")
    ),
    *(
        plain(f"torchtune {recipe}", "pytorch/torchtune/recipes", f"{recipe}.py --config configs/llama3_2/{config}.yaml "
              f"{_TUNE} {more}", inputs=("llama3_2", "instructions"), procs=(2,), env={"PROGRAMS_BACKWARD": "1"})
        for recipe, config, more in (
            ("lora_finetune_distributed", "1B_lora", "model._component_=torchtune.models.llama3_2.lora_llama3_2 "
             "model.lora_attn_modules=[q_proj,v_proj] model.lora_rank=2 model.lora_alpha=4 model.apply_lora_to_mlp=False"),
            ("qat_distributed", "1B_full", "model._component_=torchtune.models.llama3_2.llama3_2 "
             "quantizer._component_=torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer quantizer.groupsize=32"),
        )
    ),
    plain("open_clip", "mlfoundations/open_clip/src",
          "-m open_clip_train.main --model local-dir:clip --dataset-type synthetic --train-data none --train-num-samples 32 "
          "--batch-size 4 --accum-freq 2 --epochs 2 --warmup 2 --lr 1e-3 --workers 0 --precision fp32 --device cpu --seed 1 "
          "--gather-with-grad --local-loss --grad-clip-norm 1.0 --logs out --name one", inputs=("clip",),
          env={"PROGRAMS_BACKWARD": "1"}),
    # Its U-Net has the sizes of Stable Diffusion, which the shim makes small. It needs transformers 4.
    *(
        hugging(f"sd-scripts {name}", "kohya-ss/sd-scripts/.", f"{script}.py {_KOHYA} {more}", "diffusion", "kohya", procs=(2,),
                env={"PROGRAMS_BACKWARD": "1", "ACCELERATE_TORCH_DEVICE": "cpu"}, expected=expected)
        for name, script, more, expected in (
            ("lora", "train_network", f"{_KOHYA_LORA} --save_state", "equal"),
            # In windows each library rounds in another order, of which Adam makes whole steps where a gradient is 0.
            ("lora zero 2", "train_network", f"{_KOHYA_LORA} --deepspeed --zero_stage 2 --gradient_accumulation_steps 1",
             "equal"),
            ("dreambooth", "train_db", "--learning_rate_te 1e-3 --save_state", "equal"),
            # DDP refuses parameters that the loss does not use.
            ("textual inversion", "train_textual_inversion", "--token_string ~~ --init_word w --num_vectors_per_token 2",
             "own fault"),
        )
    ),
    *(
        hugging(f"peft {kind} dreambooth", f"huggingface/peft/examples/{kind}_dreambooth",
                f"train_dreambooth.py {_SD} --instance_data_dir things --instance_prompt w1 --resolution 64 --use_{kind} "
                f"{more} --train_batch_size 2 --max_train_steps 4 --gradient_accumulation_steps 2 --learning_rate 1e-3 "
                "--num_dataloader_workers 0 --no_tracemalloc --output_dir out --checkpointing_steps 2 --report_to tensorboard",
                "diffusion", procs=(2,), env={"PROGRAMS_BACKWARD": "1"})
        for kind, more in (("oft", "--oft_r 0 --oft_block_size 2"),)
    ),
    hugging("trl distillation", "huggingface/trl/examples/scripts",
            f"distillation.py {_TRL}questions --seed 1 --teacher_model_name_or_path model --max_completion_length 6",
            "language_model", "questions", procs=(2,), env={"PROGRAMS_BACKWARD": "1"}),
    *(
        hugging(f"open-instruct sft zero {stage}", "allenai/open-instruct/.",
                "open_instruct/finetune.py --model_name_or_path model --dataset_mixer_list chats 1.0 --max_seq_length 32 "
                "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --learning_rate 1e-3 --num_train_epochs 2 "
                "--output_dir out --do_not_randomize_output_dir --seed 1 --push_to_hub False --checkpointing_steps 3 "
                "--try_launch_beaker_eval_jobs False --try_auto_save_to_beaker False --logging_steps 1 --fused_optimizer False",
                "language_model", "chats", procs=(2,), env={"PROGRAMS_BACKWARD": "1", "PROGRAMS_IDLE": "ray,ray.util,beaker,"
                "wandb,olmo_core,olmo_core.nn,olmo_core.nn.attention,langdetect,immutabledict,nltk", **_zero(stage)},
                tolerance=2e-2)
        for stage in (2, 3)
    ),
)  # fmt: skip
