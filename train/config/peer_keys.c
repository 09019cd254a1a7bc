/* peer_keys.c - see peer_keys.h. */
#include "train/config/peer_keys.h"

#include <stdio.h>
#include <string.h>

#include "kernels/base.h"

#define PACKED  "a number of packed sequences of data.seq_len tokens"
#define GLOBAL  "micro-batches of all ranks together, so multiply by the number of GPUs"
#define STEPS   "a number of steps, not a share"
#define FORMAT  "none, nf4, nf4-nested, mxfp4 or nvfp4"
#define TYPE    "auto, fp32 or bf16"
#define METHOD  "full is gradient checkpointing, auto recomputes the least that fits"
#define TARGETS "q_proj, ..., attention, mixers, experts, shared_experts, dense, all-linear"
#define ANSWERS "assistant: loss on the answers, all: on every token"

static const struct peer_key keys[] = {
    /* model */
    {"model_name_or_path", "model.path", "a directory or hub:OWNER/NAME"},
    {"pretrained_model_name_or_path", "model.path", "a directory or hub:OWNER/NAME"},
    {"model_name", "model.path", "a directory or hub:OWNER/NAME"},
    {"base_model", "model.path", "a directory or hub:OWNER/NAME"},
    {"model_revision", "model.revision", NULL},
    {"load_in_4bit", "model.quantize", FORMAT},
    {"load_in_8bit", "model.quantize", FORMAT},
    {"quantization_bit", "model.quantize", FORMAT},
    {"bnb_4bit_quant_type", "model.quantize", FORMAT},
    {"bnb_4bit_use_double_quant", "model.quantize", "nf4-nested"},
    /* data */
    {"dataset", "data.train", NULL},
    {"datasets", "data.train", NULL},
    {"dataset_name", "data.train", "files or hub:OWNER/NAME/FILE"},
    {"train_file", "data.train", NULL},
    {"data_files", "data.train", NULL},
    {"eval_dataset", "data.eval", NULL},
    {"eval_file", "data.eval", NULL},
    {"validation_file", "data.eval", NULL},
    {"test_datasets", "data.eval", NULL},
    {"val_set_size", "data.eval_split", "a share of the documents, not a number"},
    {"test_size", "data.eval_split", "a share of the documents, not a number"},
    {"max_train_samples", "data.max_samples", "the first rows of each file, folder or pattern"},
    {"default_system", "data.system", NULL},
    {"default_system_message", "data.system", NULL},
    {"dataset_text_field", "data.columns", "text=FIELD"},
    {"max_seq_length", "data.seq_len", NULL},
    {"max_seq_len", "data.seq_len", NULL},
    {"max_length", "data.seq_len", NULL},
    {"model_max_length", "data.seq_len", NULL},
    {"sequence_len", "data.seq_len", NULL},
    {"sequence_length", "data.seq_len", NULL},
    {"cutoff_len", "data.seq_len", NULL},
    {"block_size", "data.seq_len", NULL},
    {"sample_packing", "data.packing", NULL},
    {"train_on_inputs", "data.loss_on", ANSWERS},
    {"assistant_only_loss", "data.loss_on", ANSWERS},
    {"completion_only_loss", "data.loss_on", ANSWERS},
    {"train_on_responses_only", "data.loss_on", ANSWERS},
    {"chat_template_kwargs", "data.chat_kwargs", NULL},
    /* rewards */
    {"reward_funcs", "reward.NAME", "NAME = KIND ARGUMENTS"},
    {"reward_weights", "reward.NAME", "NAME.weight = W"},
    {"multi_objective_aggregation", "reward.combine", "sum or normalize_then_sum"},
    /* lora */
    {"rank", "lora.r", NULL},
    {"lora_r", "lora.r", NULL},
    {"lora_rank", "lora.r", NULL},
    {"lora_alpha", "lora.alpha", NULL},
    {"lora_dropout", "lora.dropout", NULL},
    {"use_rslora", "lora.rslora", NULL},
    {"peft_use_rslora", "lora.rslora", NULL},
    {"target_modules", "lora.targets", TARGETS},
    {"lora_target_modules", "lora.targets", TARGETS},
    {"lora_target_linear", "lora.targets", TARGETS},
    {"lora_target", "lora.targets", TARGETS},
    {"lora_attn_modules", "lora.targets", TARGETS},
    {"target_parameters", "lora.targets", TARGETS},
    {"layers_to_transform", "lora.layers", NULL},
    {"lora_layers_to_transform", "lora.layers", NULL},
    {"lora_model_dir", "lora.init_from", NULL},
    {"adapter_name_or_path", "lora.init_from", NULL},
    {"init_lora_weights", "lora.init", "default, pissa or olora"},
    {"modules_to_save", NULL, "moetrain trains LoRA adapters alone"},
    {"use_dora", "lora.dora", NULL},
    /* optim */
    {"learning_rate", "optim.lr", NULL},
    {"lr_scheduler_type", "optim.schedule", NULL},
    {"lr_scheduler", "optim.schedule", NULL},
    {"scheduler", "optim.schedule", NULL},
    {"loraplus_lr_ratio", "optim.lr_ratio_b", NULL},
    {"num_cycles", "optim.cycles", NULL},
    {"num_warmup_steps", "optim.warmup_steps", NULL},
    {"lr_warmup_steps", "optim.warmup_steps", NULL},
    {"min_lr", "optim.min_lr_ratio", "a share of optim.lr, not a rate"},
    {"cosine_min_lr_ratio", "optim.min_lr_ratio", NULL},
    {"adam_beta1", "optim.beta1", NULL},
    {"adam_beta2", "optim.beta2", NULL},
    {"adam_epsilon", "optim.eps", NULL},
    {"max_grad_norm", "optim.clip_norm", NULL},
    {"clip_grad_norm", "optim.clip_norm", NULL},
    {"gradient_clipping", "optim.clip_norm", NULL},
    {"optim", "optim.kind", "adamw or adamw8"},
    {"optimizer", "optim.kind", "adamw or adamw8"},
    /* train */
    {"max_steps", "train.steps", "0, not -1, trains by train.epochs"},
    {"max_iters", "train.steps", NULL},
    {"num_train_epochs", "train.epochs", NULL},
    {"num_epochs", "train.epochs", NULL},
    {"per_device_train_batch_size", "train.micro_batch", PACKED},
    {"per_device_eval_batch_size", "train.micro_batch", PACKED ", also for evaluation"},
    {"micro_batch_size", "train.micro_batch", PACKED},
    {"batch_size", "train.micro_batch", PACKED},
    {"train_batch_size", "train.micro_batch", PACKED},
    {"gradient_accumulation_steps", "train.grad_accum", GLOBAL},
    {"grad_accumulation_steps", "train.grad_accum", GLOBAL},
    {"accumulate_grad_batches", "train.grad_accum", GLOBAL},
    {"random_state", "train.seed", NULL},
    {"random_seed", "train.seed", NULL},
    {"data_seed", "train.seed", NULL},
    {"gradient_checkpointing", "train.recompute", METHOD},
    {"use_gradient_checkpointing", "train.recompute", METHOD},
    {"activation_checkpointing", "train.recompute", METHOD},
    {"enable_activation_checkpointing", "train.recompute", METHOD},
    {"bf16", "train.dtype", TYPE},
    {"fp16", "train.dtype", TYPE},
    {"torch_dtype", "train.dtype", TYPE},
    {"compute_dtype", "train.dtype", TYPE},
    {"mixed_precision", "train.dtype", TYPE},
    {"neftune_noise_alpha", "train.neftune_alpha", NULL},
    {"resume_from_checkpoint", "train.resume", NULL},
    {"router_aux_loss_coef", "train.aux_loss_coef", NULL},
    /* parallel */
    {"num_processes", "parallel.gpus", NULL},
    {"nproc_per_node", "parallel.gpus", NULL},
    {"n_gpu", "parallel.gpus", NULL},
    {"expert_parallel_size", "parallel.ep", NULL},
    {"expert_model_parallel_size", "parallel.ep", NULL},
    {"ep_size", "parallel.ep", NULL},
    /* eval */
    {"eval_steps", "eval.every", STEPS},
    {"evals_per_epoch", "eval.every", "the number of steps between two evaluations"},
    {"eval_strategy", "eval.every", "a number of steps; 0: never"},
    {"evaluation_strategy", "eval.every", "a number of steps; 0: never"},
    {"run_val_every_n_steps", "eval.every", NULL},
    {"eval_on_start", "eval.at_start", NULL},
    {"early_stopping_patience", "eval.patience", NULL},
    /* output, log */
    {"output_dir", "output.dir", NULL},
    {"save_steps", "output.save_every", STEPS},
    {"save_every_n_steps", "output.save_every", NULL},
    {"save_strategy", "output.save_every", "a number of steps; 0: only the last"},
    {"saves_per_epoch", "output.save_every", "the number of steps between two checkpoints"},
    {"save_total_limit", "output.keep", NULL},
    {"logging_steps", "log.every", STEPS},
    {"log_every_n_steps", "log.every", NULL},
    {"report_to", "log.tensorboard", "true writes TensorBoard files; log.command has W&B and MLflow"},
    {"run_name", "log.name", NULL},
    {"wandb_name", "log.name", NULL},
    {"wandb_project", "log.command", "configs/log_wandb.py, with WANDB_PROJECT in the environment"},
};

#define BF16 "use bf16, which has the range of fp32; fp16 is not supported"

static const struct {
    const char *key, *value, *advice;
} values[] = {
    {"train.dtype", "fp16", BF16},
    {"train.dtype", "float16", BF16},
    {"train.dtype", "half", BF16},
    {"train.dtype", "bfloat16", "did you mean \"bf16\"?"},
    {"train.dtype", "float32", "did you mean \"fp32\"?"},
    {"train.device", "gpu", "did you mean \"cuda\"?"},
    {"optim.schedule", "constant_with_warmup", "use constant with optim.warmup_steps"},
    {"optim.schedule", "warmup_stable_decay", "did you mean \"wsd\"?"},
    {"optim.schedule", "cosine_with_restarts", "did you mean \"restarts\"?"},
    {"optim.schedule", "cosine_with_min_lr", "use cosine with optim.min_lr_ratio"},
    {"optim.kind", "adamw_8bit", "did you mean \"adamw8\"?"},
    {"optim.kind", "adamw_bnb_8bit", "did you mean \"adamw8\"?"},
    {"optim.kind", "adamw_torch", "did you mean \"adamw\"?"},
    {"optim.kind", "adamw_torch_fused", "did you mean \"adamw\"?"},
    {"model.quantize", "int4", "did you mean \"nf4\"?"},
    {"model.quantize", "4bit", "did you mean \"nf4\"?"},
    {"model.quantize", "fp4", "use nf4, mxfp4 or nvfp4"},
    {"model.quantize", "int8", "8 bits are not supported, use nf4"},
    {"model.quantize", "8bit", "8 bits are not supported, use nf4"},
};

const char *peer_value_advice(const char *section, const char *key, const char *value)
{
    const size_t n = strlen(section);
    for (int64_t i = 0; i < MT_LEN(values); i++)
        if (!strncmp(values[i].key, section, n) && values[i].key[n] == '.' && !strcmp(values[i].key + n + 1, key) &&
            !strcmp(values[i].value, value))
            return values[i].advice;
    return NULL;
}

bool peer_key_same(const char *given, const char *key)
{
    while (*given && (*given == '-' ? '_' : *given) == *key) given++, key++;
    return !*given && !*key;
}

const struct peer_key *peer_key_at(int64_t i) { return i < MT_LEN(keys) ? &keys[i] : NULL; }

const struct peer_key *peer_key_find(const char *name)
{
    for (int64_t i = 0; i < MT_LEN(keys); i++)
        if (peer_key_same(name, keys[i].name)) return &keys[i];
    return NULL;
}

char *peer_key_advice(char buf[256], const struct peer_key *peer)
{
    const bool both = peer->key && peer->note;
    snprintf(buf, 256, "%s%s%s%s%s", peer->key ? "use " : "", peer->key ? peer->key : "", both ? " (" : "",
             peer->note ? peer->note : "", both ? ")" : "");
    return buf;
}
