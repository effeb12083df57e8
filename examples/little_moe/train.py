"""Train a little Qwen3-MoE on the Python standard library's own sources, on a CPU.

The corpus is every module of the running interpreter's Lib folder but the tests, the
generated tables and a few modules held out whole; see `HELD_OUT` and `collect`. Batch
`s` depends on `(seed, s)` alone, so a run that was killed resumes with the batches it
would have seen.

    python train.py --work-dir /tmp/little_moe --threads 2
    torchrun --nproc-per-node 2 train.py --work-dir /tmp/little_moe

The second line shares each batch between two processes of one thread: on a machine with
other work to do, that waits once a step where two threads wait once an operator.
"""

import argparse
import logging
import math
import random
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from platform import python_version

import torch
import torch.distributed as dist
import transformers
from evaluate import END, HERE, PROMPTS, complete, encode, expert_report, held_out_loss
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

log = logging.getLogger("little_moe")

HELD_OUT = (
    "calendar.py",
    "cmd.py",
    "csv.py",
    "fractions.py",
    "heapq.py",
    "json/decoder.py",
    "queue.py",
    "sched.py",
    "textwrap.py",
)
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
SKIPPED_FILES = {"html/entities.py"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run is made of; one field per command-line option."""

    work_dir: Path
    out: Path
    seed: int
    steps: int
    stop: int | None
    batch: int
    context: int
    lr: float
    aux: float
    threads: int
    experts: str
    eval_every: int
    save_every: int


def collect(lib: Path) -> tuple[list[str], list[str]]:
    """Return the texts to train on and the texts held out, in the order of their paths."""
    train: list[str] = []
    for path in sorted(lib.rglob("*.py")):
        name = path.relative_to(lib)
        generated = name.name.startswith("_sysconfigdata") or name.parts[0].startswith("config-")
        skipped = SKIPPED_FOLDERS.intersection(name.parts) or name.as_posix() in SKIPPED_FILES
        if skipped or generated or name.as_posix() in HELD_OUT:
            continue
        train.append(path.read_text("utf-8"))
    return train, [(lib / name).read_text("utf-8") for name in HELD_OUT]


def train_tokenizer(texts: list[str], *, vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of vocab_size tokens on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def prepare(work_dir: Path) -> tuple[PreTrainedTokenizerFast, Tensor, Tensor, int]:
    """Return the tokenizer, the training ids, the held-out ids and the held-out bytes."""
    train, held_out = collect(Path(sysconfig.get_path("stdlib")))
    text = "\n".join(held_out)
    (HERE / "heldout.txt").write_text(text, "utf-8")
    if (work_dir / "tokenizer").exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(work_dir / "tokenizer")
    else:
        tokenizer = train_tokenizer(train, vocab_size=1024, context=1024)
        tokenizer.save_pretrained(work_dir / "tokenizer")
    ids, held_out_ids = encode(tokenizer, train), encode(tokenizer, [text])
    log.info(
        "corpus      %d files, %d bytes, %d tokens",
        len(train),
        sum(len(t.encode()) for t in train),
        len(ids),
    )
    log.info(
        "held out    %d files, %d bytes, %d tokens",
        len(held_out),
        len(text.encode()),
        len(held_out_ids),
    )
    return tokenizer, ids, held_out_ids, len(text.encode())


def build_model(tokenizer: PreTrainedTokenizerFast, experts: str) -> Qwen3MoeForCausalLM:
    """Return a fresh float32 model; every in_features is a multiple of 128."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
        experts_implementation=experts,
    )
    return Qwen3MoeForCausalLM(config).train()


def build_optimizer(model: Qwen3MoeForCausalLM, lr: float) -> torch.optim.AdamW:
    """Return AdamW that decays matrices and leaves norms alone."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, options: Options) -> float:
    """Return the rate of a step: linear warm-up over 100 steps, then a cosine to 2 %."""
    if step < 100:
        return options.lr * (step + 1) / 100
    progress = (step - 100) / max(1, options.steps - 100)
    return options.lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def draw_batch(ids: Tensor, step: int, options: Options) -> Tensor:
    """Return batch `step`, [batch, context + 1] int64, from random places of ids [T]."""
    generator = random.Random(options.seed * 1_000_003 + step)
    last = len(ids) - options.context - 1
    starts = [generator.randint(0, last) for _ in range(options.batch)]
    return torch.stack([ids[start : start + options.context + 1] for start in starts])


def losses(
    forward: Callable[..., MoeCausalLMOutputWithPast], config: Qwen3MoeConfig, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy and the mean over layers of the load-balancing loss.

    The model's own auxiliary loss pools the layers, and so lets one layer starve an
    expert that another feeds; here each layer must balance by itself.
    """
    with torch.autocast("cpu", torch.bfloat16):
        out = forward(input_ids=rows[:, :-1], use_cache=False, output_router_logits=True)
    logits = out.logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    each = [
        load_balancing_loss_func((layer.float(),), config.num_experts, config.num_experts_per_tok)
        for layer in out.router_logits
    ]
    return loss, torch.stack(each).mean()


@torch.no_grad()
def average_gradients(model: Qwen3MoeForCausalLM, size: int) -> None:
    """Replace each gradient by its mean over the `size` processes."""
    if size == 1:
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients]) / size
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def save_state(
    model: Qwen3MoeForCausalLM, optimizer: torch.optim.AdamW, step: int, work_dir: Path
) -> None:
    """Write weights, optimizer and step so that a kill at any moment leaves a whole state."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    save_file(weights, work_dir / "weights.tmp")
    torch.save({"optimizer": optimizer.state_dict(), "step": step}, work_dir / "state.tmp")
    (work_dir / "weights.tmp").rename(work_dir / f"weights-{step}.safetensors")
    (work_dir / "state.tmp").rename(work_dir / "state.pt")
    for old in work_dir.glob("weights-*.safetensors"):
        if old.name != f"weights-{step}.safetensors":
            old.unlink()


def load_state(model: Qwen3MoeForCausalLM, optimizer: torch.optim.AdamW, work_dir: Path) -> int:
    """Load the last state of work_dir, if any, and return the step to go on with."""
    if not (work_dir / "state.pt").exists():
        return 0
    state = torch.load(work_dir / "state.pt", weights_only=True)
    weights = load_file(work_dir / f"weights-{state['step']}.safetensors")
    model.load_state_dict(weights, strict=False)
    optimizer.load_state_dict(state["optimizer"])
    log.info("resumed     at step %d", state["step"])
    return state["step"]


def export(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> Qwen3MoeForCausalLM:
    """Write the model rounded to bf16, with its tokenizer, and return it as loaded back."""
    rounded = Qwen3MoeForCausalLM(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def train(options: Options, rank: int, size: int) -> None:
    """Train from the last state of the work folder; process 0 evaluates, saves and exports."""
    torch.manual_seed(options.seed)
    if rank > 0:
        dist.barrier()
    tokenizer, ids, held_out, num_bytes = prepare(options.work_dir)
    if rank == 0 and size > 1:
        dist.barrier()
    model = build_model(tokenizer, options.experts)
    optimizer = build_optimizer(model, options.lr)
    num_params = sum(p.numel() for p in model.parameters())
    num_expert = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    log.info("parameters  %d, of which experts %d", num_params, num_expert)
    first = load_state(model, optimizer, options.work_dir)
    bits = (len(held_out) - 1) / num_bytes / math.log(2)
    forward = torch.compile(model, dynamic=False)
    mark, mark_step, total = time.perf_counter(), first, 0.0
    last = min(options.steps, options.stop or options.steps)
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        rows = draw_batch(ids, step, options)[rank::size]
        loss, aux = losses(forward, model.config, rows)
        (loss + options.aux * aux).backward()
        average_gradients(model, size)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.item()
        done = step + 1
        if rank > 0:
            continue
        if done % 50 == 0:
            seconds = time.perf_counter() - mark
            speed = (done - mark_step) * options.batch * options.context / seconds
            log.info(
                "step %5d  loss %.4f  balance %.4f  lr %.2e  %6.0f tokens/s",
                done,
                total / (done - mark_step),
                aux.item(),
                learning_rate(step, options),
                speed,
            )
            mark, mark_step, total = time.perf_counter(), done, 0.0
        if done % options.eval_every == 0 or done == last:
            report_loss(f"step {done:5d}", held_out_loss(model, held_out, options.context), bits)
            mark = time.perf_counter()
        if done % options.save_every == 0 or done == last:
            save_state(model, optimizer, done, options.work_dir)
            export(model, tokenizer, options.work_dir / "interim")
            mark = time.perf_counter()
    if rank > 0:
        return
    rounded = export(model, tokenizer, options.out).eval()
    report_loss("bf16      ", held_out_loss(rounded, held_out, options.context), bits)
    for line in expert_report(rounded, held_out, options.context):
        log.info("%s", line)
    for prompt in PROMPTS:
        log.info("completion of %r\n%s\n", prompt, complete(rounded, tokenizer, prompt))


def report_loss(label: str, nats: float, bits: float) -> None:
    """Log a held-out loss of `nats` a token, where a nat a token is `bits` a byte."""
    log.info(
        "%s  held-out loss %.4f  perplexity %.3f  bits/byte %.4f",
        label,
        nats,
        math.exp(nats),
        nats * bits,
    )


def parse() -> Options:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True, help="states and interim model")
    parser.add_argument("--out", type=Path, default=HERE / "bf16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3200)
    parser.add_argument("--stop", type=int, help="leave the schedule after this step")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--aux", type=float, default=0.01, help="weight of the balancing loss")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--experts", default="grouped_mm", choices=("eager", "grouped_mm"))
    parser.add_argument("--eval-every", type=int, default=500)
    parser.add_argument("--save-every", type=int, default=250)
    return Options(**vars(parser.parse_args()))


def main() -> None:
    """Set threads and log, then train."""
    options = parse()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    rank, size = 0, 1
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        handlers = [logging.StreamHandler(), logging.FileHandler(options.work_dir / "train.log")]
        logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=handlers)
        log.setLevel(logging.INFO)
    torch.set_num_threads(options.threads)
    log.info("date        %s", date.today().isoformat())
    log.info(
        "versions    python %s, torch %s, transformers %s",
        python_version(),
        torch.__version__,
        transformers.__version__,
    )
    shown = {k: v for k, v in asdict(options).items() if k not in ("work_dir", "out")}
    log.info("options     processes=%d %s", size, " ".join(f"{k}={v}" for k, v in shown.items()))
    train(options, rank, size)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
