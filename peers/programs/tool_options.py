"""The options of each tool of `swarm`, as `peers.options` has those of the roles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from peers import options as arg
from peers.options import option, optional, repeated, several, switch
from swarm.charter import MAX_LIFE_DAYS, MAX_WORK_BITS, Door, Role
from swarm.codecs import KNOWN, parse_codec
from swarm.errors import SetupError

MINE = "which peers (default: all that you run on this machine)"
FACES, HISTORY = "faces, besides the terminal", "history"
JSON_HELP = "print one JSON object instead of lines"
YES_HELP = "start as many processes as that takes, however few cores there are"
TERMS_HELP = "the terms of the run (TOML)"


def _codec(text: str) -> str:
    if parse_codec(text) is None:
        raise arg.wrong(text, f"a codec: {KNOWN}, such as topk:0.05")
    return text


DOORS = ("open", "list", "token")
OWNER_HELP = "the owner's key, as swarm init made it"
RENEWAL = "(default: 30); a bootstrap with the owner's key renews it 10 days before"
TEXT = arg.OptionKind(str, "PROMPT")
WORDS = arg.OptionKind(str, "TEXT")
INTEGER = arg.OptionKind(arg.whole(-1024, 1023), "N")
WORK_BITS = arg.OptionKind(arg.whole(0, MAX_WORK_BITS), "BITS")
USES = arg.OptionKind(arg.whole(1, 1000), "N")
KILLS = arg.OptionKind(arg.whole(0, 1000), "N")
DAYS = arg.OptionKind(arg.between(MAX_LIFE_DAYS, "a number of days: above 0, up to 30", above=True), "DAYS")
MODEL = arg.OptionKind(str, "MODEL")
SHELL = arg.OptionKind(str, "SHELL")
CODEC = arg.OptionKind(_codec, "NAME")
HOURS = arg.OptionKind(arg.between(10_000, "a number of hours: above 0, up to 10000", above=True), "H")
TEMPERATURE = arg.OptionKind(arg.between(100, "a temperature: 0 to 100"), "X")
SPEED = arg.OptionKind(arg.between(1e6, "a speed: above 0, up to 1000000", above=True), "X")
PART = arg.OptionKind(
    arg.between(1, "a part of all numbers: above 0, below 1, such as 0.01", above=True, below=True), "R"
)
GIBIBYTES = arg.OptionKind(arg.between(1e6, "GiB of a file: above 0, up to 1000000", above=True), "GIB")

WITHOUT = ("--replay", "--manifest", "--devices")
"""What is looked at instead of a run."""


class MaybeMembership(arg.Options):
    """Which run, and where it is met, of commands that can do without."""

    run: str | None = optional(arg.ANY_RUN, arg.RUN_HELP, group=arg.RUN, variable="SWARM_RUN", unless=WITHOUT)
    join: tuple[str, ...] = repeated(
        arg.PEER_ADDRESS, arg.JOIN_HELP, group=arg.RUN, variable="SWARM_JOIN", unless=WITHOUT
    )


class ModelOptions(arg.WeightsOptions):
    """Weights of this machine, or of a run that goes on."""

    join: tuple[str, ...] = repeated(
        arg.PEER_ADDRESS,
        "or a peer of the run: fetch the newest version that its peers and keepers can give; needs --run",
        group=arg.WEIGHTS,
        one_of="weights!",
    )
    allow_code: tuple[str, ...] = repeated(arg.WORD, arg.ALLOW_HELP, group=arg.WEIGHTS)


class ComputedOptions(ModelOptions):
    """Weights that are computed with."""

    tokenizer: Path | None = optional(arg.FILE, arg.TOKENIZER_HELP, group=arg.WEIGHTS)
    device: str = option(arg.DEVICE, "compute on this (default: %(default)s)", "cpu", group=arg.WEIGHTS)


class ManifestOptions(arg.Options):
    """Print an example of a run's manifest, or check one.

    swarm manifest > run.toml
    swarm manifest run.toml
    """

    manifest: Path | None = optional(
        arg.FILE,
        "check this one (-: standard input): print its canonical text; without FILE, an example to edit",
        positional=True,
    )


# --- an owner's ---


def check_text(files: Sequence[Path | str]) -> None:
    """Raises SetupError: a file is no text, though bytes could be trained on."""
    for path in files:
        if isinstance(path, Path) and path.is_file():
            with path.open("rb") as file:
                if b"\0" in file.read(4096):
                    raise SetupError(f"{path} is not text: it has null bytes; give a text file")


class InitOptions(arg.Options):
    """Make a run of your own: its manifest, charter and keys.

    swarm init myrun
    swarm init myrun --data corpus.txt
    swarm init myrun --manifest run.toml --data corpus.txt
    """

    name: Path = option(arg.OptionKind(arg.path, "NAME"), "of the run, and of a new folder", positional=True)
    manifest: Path | None = optional(arg.FILE, "the terms of the run (default: those of swarm demo)")
    data: tuple[Path | str, ...] = several(arg.DATA, arg.DATA_HELP)
    tokenizer: Path | None = optional(arg.NEEDED_FILE, arg.TOKENIZER_HELP)
    eval_data: tuple[Path | str, ...] = several(arg.DATA, arg.EVAL_HELP)
    start: Path | None = optional(arg.NEEDED_FILE, arg.START_HELP)
    peers: Door = option(None, "who may serve a stage (default: open)", "open", choices=DOORS)
    keepers: Door = option(None, "who may keep checkpoints (default: open)", "open", choices=DOORS)
    work_bits: int = option(WORK_BITS, "a stamp of so many bits, where open; 27: 3 minutes (default: 0)", 0)
    days: float = option(DAYS, f"until the charter expires {RENEWAL}", 30.0)


class UpOptions(arg.Options):
    """Train a run that swarm init made, with peers of this machine.

    swarm up myrun
    """

    folder: Path = option(arg.ANY_DIR, "that swarm init made", positional=True)
    peers: int = option(arg.COUNT, "peers of each stage (default: %(default)s)", 1)
    device: str = option(arg.DEVICES, "of the peers, in turn if there are several (default: cpu)", "cpu")
    data: tuple[Path | str, ...] = several(arg.DATA, "text files, if swarm init was given any elsewhere")
    tokenizer: Path | None = optional(arg.NEEDED_FILE, arg.TOKENIZER_HELP)
    eval_data: tuple[Path | str, ...] = several(arg.DATA, arg.EVAL_HELP)
    start: Path | None = optional(arg.NEEDED_FILE, arg.START_HELP)
    yes: bool = switch(YES_HELP)


class InviteOptions(arg.Options):
    """Print a token that lets another machine take part in your run.

    swarm invite --manifest myrun/run.toml --owner myrun/owner.key --role peer --days 7
    """

    manifest: Path = option(arg.FILE, "the run's, as swarm init wrote it")
    owner: Path = option(arg.FILE, OWNER_HELP)
    role: Role = option(None, "what for (default: peer)", "peer", choices=("peer", "trainer", "keeper"))
    days: float = option(DAYS, "until it expires (default: 7)", 7.0)
    uses: int = option(USES, "identities that it admits at a time (default: 1)", 1)


class UnbanOptions(arg.RunOptions):
    """Let a peer that you banned take part again.

    swarm unban PEER @join.txt --owner myrun/owner.key
    """

    peer: str = option(arg.PEER_ID_KIND, "its id", positional=True)
    owner: Path = option(arg.FILE, OWNER_HELP)


class BanOptions(UnbanOptions):
    """Keep a peer out of your run.

    swarm ban PEER @join.txt --owner myrun/owner.key --why 'wrong gradients'
    """

    why: str = option(WORDS, "what others are told")


class CharterOptions(arg.RunOptions):
    """Show which peers may take part in a run; with its key, change that.

    swarm charter @join.txt
    swarm charter @join.txt --owner myrun/owner.key --peers token
    """

    owner: Path | None = optional(arg.FILE, OWNER_HELP)
    days: float = option(DAYS, f"until it expires {RENEWAL}", 30.0)
    peers: Door | None = option(None, "who may serve a stage", None, choices=DOORS)
    trainers: Door | None = option(None, "who may train, if the manifest names none", None, choices=DOORS)
    keepers: Door | None = option(None, "who may keep checkpoints", None, choices=DOORS)
    name_peer: tuple[str, ...] = repeated(arg.PEER_ID_KIND, "admit it to any stage; repeatable")
    name_trainer: tuple[str, ...] = repeated(
        arg.PEER_ID_KIND, "admit it as a trainer, if the manifest names none; repeatable"
    )
    name_keeper: tuple[str, ...] = repeated(arg.PEER_ID_KIND, "admit it as a keeper; repeatable")
    founder: tuple[str, ...] = repeated(
        arg.PEER_ID_KIND, "admit it to any stage, as a founder without voice; repeatable"
    )
    unname: tuple[str, ...] = repeated(arg.PEER_ID_KIND, "take it from all of these; repeatable")
    trusted_stages: tuple[int, ...] | None = optional(
        INTEGER, "only named or invited peers serve these, on all islands; -1: last; no N: none", nargs="*"
    )
    work_bits: int | None = optional(WORK_BITS, "a stamp of so many bits, where open; peers without one end")


class RevokeOptions(arg.RunOptions):
    """Say of a key of yours that it is to be trusted no more.

    swarm revoke @join.txt --identity stolen.key
    """

    identity: Path = option(arg.FILE, "the file of the key")


class AuditOptions(arg.MemberOptions, arg.NetworkOptions):
    """Compute again what peers added to a run of yours; serves nothing.

    swarm audit @join.txt --identity myrun/auditor.key
    """

    identity: Path | None = optional(
        arg.NEEDED_FILE,
        "key file of the owner, or of a trainer that the manifest names",
        group=arg.NETWORK,
        variable="SWARM_IDENTITY",
    )
    stages: tuple[int, ...] = several(arg.NUMBER, "audit these only (default: all, in turn)")
    start: Path | None = optional(arg.NEEDED_FILE, arg.START_HELP)
    device: str = option(arg.DEVICE, "default: CUDA if there is, else CPU", "auto")
    threads: int | None = optional(arg.THREADS, "cores to compute on, each a microbatch (default: all)")


# --- of a machine's owner ---


class OwnerOptions(arg.Options):
    """Which peers of this machine; all that are given must fit."""

    identity: Path | None = optional(arg.FILE, "the one that was started with this key", group=MINE)
    pid: int | None = optional(arg.COUNT, "the one of this process", group=MINE)
    device: str | None = optional(arg.WORD, "those on this device, such as cuda:1", group=MINE)


class PauseOptions(OwnerOptions):
    """Give this machine's device back to you; the peer keeps its place.

    swarm pause
    swarm pause --identity peer.key
    """


class ResumeOptions(OwnerOptions):
    """Let a paused peer of this machine work again.

    swarm resume
    swarm resume --identity peer.key
    """


class HealthOptions(arg.Options):
    """Say whether a program of this machine is well: for containers.

    swarm health peer.sock
    """

    socket: Path = option(arg.SOCKET, "what it was given as --health", positional=True)
    json: bool = switch("print one JSON object instead of a line")


# --- everybody's ---


class StatusOptions(arg.RunOptions):
    """List which peer serves which stage, and how far the run is.

    swarm status @join.txt
    """

    json: bool = switch("print one JSON object instead of the table")
    no_calls: bool = switch("directory records only: do not ask the peers themselves")


class DashboardOptions(MaybeMembership):
    """Watch a run: in this terminal, as a web page, for Prometheus.

    swarm dashboard @join.txt
    swarm dashboard @join.txt --web :8080
    swarm dashboard @join.txt --report-to tensorboard
    swarm dashboard --replay history.jsonl --speed 10
    """

    web: arg.Listen | None = optional(
        arg.LISTEN, "a web page, and /api/health (default IP: 127.0.0.1, for this machine only)", group=FACES
    )
    metrics: arg.Listen | None = optional(
        arg.LISTEN, "numbers for Prometheus at /metrics (default IP: 127.0.0.1)", group=FACES
    )
    report_to: tuple[str, ...] = repeated(
        arg.WORD,
        "wandb, tensorboard (in ./runs) or trackio: loss, tokens/s, peers, faults; repeatable",
        group=FACES,
        choices=("wandb", "tensorboard", "trackio"),
    )
    record: Path | None = optional(arg.FILE, "append all that is seen to a file", group=HISTORY)
    record_max: float = option(
        GIBIBYTES,
        "of that file; a full one becomes FILE.1, in the place of an older one (default: 1)",
        1.0,
        group=HISTORY,
    )
    """GiB."""
    replay: Path | None = optional(arg.FILE, "show such a file instead of a run", group=HISTORY)
    speed: float = option(SPEED, "of a replay: times as fast (default: 1)", 1.0, group=HISTORY)


class CheckOptions(arg.Options):
    """Check that this machine can be a peer, or say what to change.

    swarm check --port 31337 --device cuda
    swarm check --port 31337 --join ADDRESS
    """

    device: str = option(arg.OptionKind(str, "auto|cpu|cuda[:N]|mps"), "to use (default: auto)", "auto")
    host: str = option(arg.IP, "listen here (default: 127.0.0.1; with --join, as swarm peer does)", "")
    port: int = option(arg.PORT, "port to listen on (default: any)", 0)
    join: tuple[str, ...] = repeated(
        arg.PEER_ADDRESS, "a peer of the run that tries to dial this machine; several tell more of its router"
    )
    json: bool = switch(JSON_HELP)


class DemoOptions(arg.Options):
    """Run a whole swarm here: it trains, loses peers, and loses no work.

    swarm demo --stages 3 --peers 2 --preempt 2 --verify
    """

    stages: int | None = optional(arg.COUNT, "stages of the model (default: 3)")
    peers: int = option(arg.COUNT, "peers of each stage (default: %(default)s)", 2)
    steps: int | None = optional(arg.COUNT, "optimizer steps (default: 300: three minutes of two cores)")
    preempt: int = option(KILLS, "peers to kill on the way (default: %(default)s)", 1)
    codec: str | None = optional(
        CODEC,
        f"how activations and gradients travel: {KNOWN}; a top-k sends the largest only, a part R of all "
        "(default: blockwise8)",
    )
    data: tuple[Path, ...] = repeated(
        arg.NEEDED_FILE, "text to train on; repeatable (default: little tales that it tells itself)"
    )
    manifest: Path | None = optional(arg.FILE, "train this run instead of the built-in one")
    eval_data: tuple[Path | str, ...] = several(arg.DATA, arg.EVAL_HELP)
    start: Path | None = optional(arg.NEEDED_FILE, arg.START_HELP)
    seed: int | None = optional(arg.SEED, "of weights, data and kills (default: 1)")
    yes: bool = switch(YES_HELP)
    json: bool = switch("print a JSON object as the last line of stdout")
    verify: bool = switch("train the same in one process too, and compare every loss and weight")


class ExportOptions(ModelOptions):
    """Make one model file of the stages' checkpoints.

    swarm export --checkpoint-dir ckpt --out model.safetensors
    swarm export --checkpoint-dir ckpt --hf folder
    swarm export @join.txt --out model.safetensors
    """

    out: Path | None = optional(
        arg.FILE, "a .safetensors file; what it is will stand in a .json beside it", one_of="target!"
    )
    """Of checkpoints only."""
    hf: Path | None = optional(
        arg.DIR,
        "a new folder for transformers' from_pretrained; for models of transformers, or of Llama's form",
        one_of="target!",
    )
    adapter: Path | None = optional(
        arg.DIR, "a new folder for peft's from_pretrained; for runs with a [lora]", one_of="target!"
    )
    tokenizer: Path | None = optional(arg.FILE, "its JSON, to go into the folder of --hf")


class GenerateOptions(ComputedOptions):
    """Let a trained model continue a text.

    swarm generate --model model.safetensors 'The import '
    swarm generate --checkpoint-dir ckpt --tokens 500 'The import '
    """

    prompt: str = option(TEXT, "what to continue (default: %(default)r)", "The ", positional=True)
    tokens: int = option(arg.COUNT, "how many to write (default: %(default)s)", 200)
    temperature: float = option(TEMPERATURE, "0 = always the likeliest (default: 0.8)", 0.8)
    seed: int = option(arg.SEED, "of the words that are drawn (default: %(default)s)", 0)


class EvalOptions(ComputedOptions):
    """Measure how well a trained model knows a text.

    swarm eval --model model.safetensors --data held-out.txt --samples 500 --json
    swarm eval @join.txt --data held-out.txt
    """

    data: tuple[Path | str, ...] = several(arg.DATA, "any text files, or an index (default: the training's)")
    """Where code makes the samples: one `package.module:function` that makes others."""
    samples: int = option(arg.COUNT, "how many, spread evenly over the text (default: %(default)s)", 64)
    threads: int | None = optional(arg.THREADS, "cores to compute on (default: all)")
    json: bool = switch(JSON_HELP)


class VerifyOptions(arg.Options):
    """Compute steps of a run again, and compare with what peers signed.

    swarm verify --transcript ckpt/5a7c.../transcript --data corpus.txt --from 100 --to 200
    """

    transcript: Path = option(arg.NEEDED_FILE, "a keeper writes it into the run's folder of its --dir")
    checkpoint_dir: Path | None = optional(
        arg.NEEDED_DIR, "with the checkpoint of --from (default: the keeper's, in which the transcript is)"
    )
    data: tuple[Path | str, ...] = several(arg.DATA, arg.DATA_HELP)
    tokenizer: Path | None = optional(arg.NEEDED_FILE, arg.TOKENIZER_HELP)
    start: Path | None = optional(arg.NEEDED_FILE, arg.START_HELP)
    allow_code: tuple[str, ...] = repeated(arg.WORD, arg.ALLOW_HELP)
    from_: int = option(arg.NUMBER, "the version to start at: 0, or one with a checkpoint")
    to: int = option(arg.COUNT, "the version to end at; its checkpoint is compared too, if it is there")
    stage: int | None = optional(arg.NUMBER, "compare this one only; of islands: this cell (default: all)")
    scratch: Path | None = optional(
        arg.DIR, "put there what is not being computed: one stage at a time is in memory (default: all are)"
    )
    device: str = option(arg.DEVICE, "of the peers' kind: then bits are compared (default: cpu)", "cpu")


class PlanOptions(MaybeMembership):
    """Say which machine should serve which stage, and how fast that is.

    swarm plan --manifest run.toml --devices devices.toml --budget 10
    swarm plan @join.txt
    """

    manifest: Path | None = optional(arg.FILE, TERMS_HELP)
    devices: Path | None = optional(arg.FILE, "the machines and what lies between them (TOML)")
    allow_code: tuple[str, ...] = repeated(arg.WORD, arg.ALLOW_HELP)
    seed: int = option(arg.SEED, "of the search (default: %(default)s)", 0)
    budget: float = option(arg.SECONDS, "CPU seconds to search (default: %(default)s)", 5.0)
    survive_region: bool = switch(
        "have devices of two regions in every stage, so that one region may be lost"
    )
    keep: float | None = optional(
        PART, "also say which codecs slow boundaries should have: a top-k, with at least this part"
    )
    json: bool = switch(JSON_HELP)


class SimulateOptions(arg.Options):
    """Tell how fast a run would be on machines that are only described.

    swarm simulate --manifest run.toml --devices devices.toml
    swarm simulate --manifest run.toml --devices devices.toml --layout plan.json
    swarm simulate --manifest run.toml --devices devices.toml --trace spot.json --json
    """

    manifest: Path = option(arg.FILE, TERMS_HELP)
    devices: Path = option(arg.FILE, "the machines and their lines (TOML)")
    trace: Path | None = optional(
        arg.FILE,
        "how many of them are up when: lines of `seconds,count` or `seconds,count,region`, or JSON with "
        "metadata.gap_seconds and data (default: all, for ever)",
    )
    layout: Path | None = optional(
        arg.FILE, "which of them serve which stage: what swarm plan --json printed (default: by their speed)"
    )
    hours: float = option(HOURS, "hours of virtual time (default: %(default)s)", 1.0)
    """A trace that is shorter ends it."""
    seed: int = option(arg.SEED, "of all that is drawn (default: %(default)s)", 0)
    json: bool = switch(JSON_HELP)


class CompletionOptions(arg.Options):
    """Print what lets your shell complete the arguments of swarm.

    swarm completion bash > ~/.local/share/bash-completion/completions/swarm
    swarm completion zsh > ~/.zfunc/_swarm
    """

    shell: str = option(
        SHELL, "bash or zsh; put ~/.zfunc into zsh's fpath", positional=True, choices=("bash", "zsh")
    )


class TokenizeOptions(arg.Options):
    """Make texts into tokens and their index, which trainers fetch from.

    swarm tokenize books/*.jsonl.zst --tokenizer tokenizer.json --out books
    swarm tokenize web/index.json books train.bin --weights 7 2 1 --out mix
    swarm tokenize hf:roneneldan/TinyStories --tokenizer tokenizer.json --out tales
    """

    files: tuple[Path | str, ...] = option(
        arg.OptionKind(lambda text: text if text.startswith("hf:") else arg.path(text), "FILE", arg.is_there),
        ".txt, .jsonl, .parquet, .arrow (.gz, .zst); .bin of nanoGPT or Megatron, .ds of datatrove; indexes; "
        "data sets of Hugging Face: hf:OWNER/NAME[@REVISION][:CONFIG][:SPLIT] (:: for its own configuration)",
        positional=True,
        nargs="+",
    )
    out: Path = option(arg.DIR, "folder for the index and its shards; started again, it goes on there")
    tokenizer: Path | None = optional(
        arg.FILE, "tokenizer.json, or a name on Hugging Face's hub (default: bytes)"
    )
    eos: str | None = optional(
        arg.WORD, "token behind each document; or none (default: as the tokenizer has it)"
    )
    field: str = option(arg.WORD, "of rows, the one with the text (default: %(default)s)", "text")
    vocab_size: int | None = optional(arg.COUNT, "of the model (default: as many as the tokenizer has)")
    weights: tuple[int, ...] = several(arg.COUNT, "for a mixture: samples from each file, such as 7 2 1")
    jobs: int | None = optional(arg.COUNT, "processes (default: one for each core)")


class GraphOptions(arg.Options):
    """Show a model as its operators, and cut into stages.

    swarm graph --model my_package.models:build --stages 4
    swarm graph --model hf:config.json --stages 3 --dot > model.dot
    """

    model: str = option(
        MODEL,
        "package.module:function of an installed package, hf:CONFIG.json of transformers, or a manifest "
        "(.toml); a function gives (module, inputs), or (module, inputs, loss, targets)",
    )
    stages: int = option(arg.COUNT, "cut it into so many (default: %(default)s)", 1)
    rows: int = option(arg.COUNT, "samples, for hf: (default: %(default)s)", 2)
    length: int = option(arg.COUNT, "tokens, for hf: (default: %(default)s)", 128)
    calibrate: bool = switch(
        "time each operator on this machine: costs are its seconds, and stages are cut by them"
    )
    dot: bool = switch("print it for Graphviz, which draws it: dot -Tpng -O FILE", one_of="shown")
    json: bool = switch(JSON_HELP, one_of="shown")
