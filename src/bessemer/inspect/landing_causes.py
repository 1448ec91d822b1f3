"""What an error, a signal or a line of the kernel says about the cause: its class, how sure that is, what to do next.

Classes: data, code, hardware, network, operator, unknown. Confidences are judgements, not measurements: 0.9 where the
text admits one reading, 0.6 to 0.8 where it usually has it, below 0.5 where two classes fit. With class "unknown" the
confidence is of the rank alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bessemer.inspect.landing_traces import Trace
from bessemer.keep.member import sounds_like_a_lost_peer

__all__ = [
    "CORRUPT", "DISK_FULL", "DIVERGED", "IN_NATIVE_CODE", "SUMMED", "UNEXPLAINED", "VICTIM_CODES", "Cause",
    "cause_of_code", "cause_of_kernel", "cause_of_signal", "cause_of_trace", "is_victim",
]  # fmt: skip


@dataclass(frozen=True)
class Cause:
    kind: str  # the class
    confidence: float
    next: str


VICTIM_CODES = ("peer-lost", "agent-lost", "services-lost", "agent-silent", "coordinator-lost", "vault-lost")
"""What a rank reports when another process has ended: a consequence."""

OUT_OF_MEMORY = Cause(
    "operator",
    0.85,
    "make the job smaller on each rank: a smaller train.micro_batch, train.recompute, or more sharding; "
    "`bessemer check` prints what would fit",
)
DISK_FULL = Cause("operator", 0.9, "free space on the disk that the evidence names, then start the same command again")
CODE = Cause("code", 0.85, "read the stack in the log of that rank; the same job fails again until the code is mended")
IMPORTS = Cause(
    "code", 0.85, "make the installations the same on all hosts: `pip check`, and the versions of torch and bessemer"
)
WRONG_REQUEST = Cause("operator", 0.9, "change the job or the command as the message says; `bessemer check JOB`")
BAD_DATA = Cause("data", 0.9, "mend or leave out the file that the message names, then start again")
BAD_DISK = Cause("hardware", 0.45, "check the disk and file system that the message names")
TOO_MANY_FILES = Cause(
    "operator", 0.8, "raise the limit of open files of that process (`ulimit -n`); if it comes again look for a leak"
)
PORT_IN_USE = Cause(
    "operator", 0.85, "end the process that has the port (`ss -ltnp`), or choose another one: MASTER_PORT"
)
NETWORK = Cause("network", 0.5, "check that all hosts reach the named address, and the interfaces' error counters")
DIVERGED = Cause("code", 0.6, "a lower train.lr, more train.warmup_steps or a clip; go on from an earlier checkpoint")
SUDDEN = Cause(
    "data",
    0.45,
    "look at the samples that the message names; run the step again: if it repeats it is data or code, else hardware",
)
BAD_PARAMETER = Cause(
    "code",
    0.45,
    "start again from the checkpoint: if the same parameter is bad again at the same step it is code, else hardware",
)
CORRUPT = Cause(
    "hardware",
    0.8,
    "what this rank computed or holds isn't what the others have of the same: take its host out and test memory and "
    "accelerator",
)
IN_NATIVE_CODE = Cause("code", 0.45, "look at the native call at the end of the stack; test the host's memory")
NOT_AGAIN = Cause(
    "hardware",
    0.6,
    "the same passes gave no bad value when they were run again at once: test memory and accelerator of that host",
)
SUMMED = "the summed "
OF_A_SUM = Cause(
    "unknown", 0.3, "only the sum is bad here: what made it is on another rank, or went wrong between the ranks"
)
BAD_TOKEN = Cause(
    "data",
    0.6,
    "a token id is beyond the vocabulary: compare the tokenizer with model.vocab_size, and look at the samples",
)
CUT_FILE = Cause(
    "data",
    0.6,
    "a token file that is mapped into memory has lost its end, or its disk answers no more: compare its length with "
    "the manifest beside it, and see what else writes there",
)
UNEXPLAINED = Cause("unknown", 0.6, "read the log of that rank")

_BY_CODE: dict[str, Cause] = {
    **dict.fromkeys(("disk-full", "cache-full", "file-too-large"), DISK_FULL),
    **dict.fromkeys(("memory", "no-memory"), OUT_OF_MEMORY),
    **dict.fromkeys(("checkpoint-damaged", "memory-damaged", "damaged-records", "damaged-run"), BAD_DISK),
    **dict.fromkeys(("shard-damaged", "jsonl-line", "parquet-file", "binary-file", "file-unreadable"), BAD_DATA),
    **dict.fromkeys(("data", "split-empty", "val-none", "paths-empty", "tokenizer-file", "tokenizer-eos"), BAD_DATA),
    **dict.fromkeys(("ranks-not-met", "exchange-failed"), NETWORK),
    **dict.fromkeys(
        (
            "request", "config", "missing-extra", "run-folder", "run-in-use", "run-exists", "other-job", "other-folder",
            "world-size", "bad-launch", "bad-command", "no-launch", "no-job", "no-master", "port-in-use",
            "checkpoint-none", "checkpoint-missing", "no-checkpoint", "weights-mismatch", "weights-files",
            "device-missing", "device-count", "not-runnable", "run-folder-unwritable", "cache-unwritable",
        ),
        WRONG_REQUEST,
    ),
}  # fmt: skip
_DATA_FAMILIES = ("corpus-", "megatron-", "tokenizer-")

_BY_WORDS: tuple[tuple[str, Cause], ...] = (
    (r"out of ?memory|DefaultCPUAllocator|can't allocate memory|cannot allocate memory|\bMemoryError\b", OUT_OF_MEMORY),
    (
        r"no space left on device|errno 28|errno 122|errno 27|file too large|quota exceeded"
        r"|bytes are needed and [\d,]+ are free",
        DISK_FULL,
    ),
    (r"errno 24\b|too many open files", TOO_MANY_FILES),
    (r"errno 98\b|address already in use", PORT_IN_USE),
    (r"errno 5\b|input/output error|stale file handle|errno 116", Cause("hardware", 0.7, BAD_DISK.next)),
    (
        r"uncorrectable ecc|hardware error|double bit ecc|\bxid\b",
        Cause("hardware", 0.9, "take that host out of the run and let its accelerator be tested"),
    ),
    (r"device-side assert", CODE),
    (
        r"illegal memory access|unspecified launch failure|misaligned address",
        Cause("code", 0.45, "run the step again on another device: if it repeats it is the kernel, else the device"),
    ),
    (
        r"modulenotfounderror|importerror|undefined symbol|version `glibc|no module named|cannot import name"
        r"|has no attribute '__version__'",
        IMPORTS,
    ),
    (r"\bkeyboardinterrupt\b", Cause("operator", 0.8, "start the same command again; it goes on from what is saved")),
)
_DAMAGED = re.compile("checksum|bytes, the manifest says")
_OF_DATA = "bessemer/data/"
_DATA_ERROR, _REQUESTS = "DataError", ("RequestError", "ConfigError", "MissingExtra", "RunFolderError")


def is_victim(code: str, text: str) -> bool:
    """Whether a report only tells that another process is gone."""
    return code in VICTIM_CODES or (code in ("", "crash") and sounds_like_a_lost_peer(text))


def cause_of_trace(trace: Trace, norms: Sequence[float]) -> Cause:
    """Of an error in a log. norms: gradient norms of the steps before, by which a run that diverges is told from one
    that broke at once."""
    inside = [file for file, _, _ in trace.frames]
    if trace.kind == "fatal" and trace.message.startswith("Bus error") and any(_OF_DATA in file for file in inside):
        return CUT_FILE
    if trace.kind == "IndexError" and trace.frames and trace.frames[-1][2] == "embedding":
        return BAD_TOKEN
    return _of_text(trace.kind, trace.message, norms)


def _of_text(kind: str, message: str, norms: Sequence[float]) -> Cause:
    name = kind.rpartition(".")[2]
    if name == "NonFinite" or "is not finite" in message:
        return _non_finite(message, norms)
    text = f"{kind}: {message}".lower()
    for words, cause in _BY_WORDS:
        if re.search(words, text, re.IGNORECASE):
            return cause
    if name == _DATA_ERROR:
        return BAD_DATA
    if name in _REQUESTS:
        return WRONG_REQUEST
    if name == "CheckpointError":
        return BAD_DISK if _DAMAGED.search(text) else UNEXPLAINED
    if kind == "fatal":
        return IN_NATIVE_CODE
    return UNEXPLAINED if kind == "words" else CODE


def cause_of_code(code: str, message: str, norms: Sequence[float]) -> Cause:
    """Of a report in events.jsonl, where no log says more."""
    if code.startswith("non-finite"):
        return _non_finite(message, norms)
    if code == "checkpoint-none" and _DAMAGED.search(message.lower()):
        return BAD_DISK
    if code in _BY_CODE:
        return _BY_CODE[code]
    if code.startswith(_DATA_FAMILIES):
        return BAD_DATA
    if code == "crash":
        kind, _, rest = message.partition(": ")
        cause = _of_text(kind, rest, norms)
        return Cause(cause.kind, cause.confidence - 0.1, cause.next)
    return Cause("unknown", 0.6, f"docs/errors.md says what the code {code!r} means")


def cause_of_signal(name: str) -> Cause:
    """Of a death by signal, where neither kernel nor log says more."""
    return {
        "SIGKILL": Cause(
            "unknown",
            0.8,
            "nobody left a trace of who sent SIGKILL: ask `dmesg` of that host for the out-of-memory killer, and "
            "the scheduler for its reason; if neither, start again and watch that rank's memory",
        ),
        "SIGTERM": Cause("operator", 0.6, "ask the scheduler or its operator why that process was ended"),
        "SIGINT": Cause("operator", 0.7, "start the same command again"),
        "SIGSEGV": Cause(
            "code", 0.45, "native code or memory: start again elsewhere; if the same call dies again it is the code"
        ),
        "SIGFPE": Cause("code", 0.6, "look at the native call at the end of the stack"),
        "SIGBUS": Cause("hardware", 0.45, "check /dev/shm and the disk behind mapped files for room, then the memory"),
        "SIGILL": Cause(
            "code", 0.45, "the binary has instructions that this CPU lacks, or the host is broken: rebuild"
        ),
        "SIGABRT": Cause("code", 0.45, "a library gave up: read the last lines of that log"),
        "SIGSTOP": Cause("operator", 0.6, "something stopped that process (SIGSTOP, a debugger): ask who"),
    }.get(name, UNEXPLAINED)


def cause_of_kernel(text: str) -> Cause | None:
    """Of a line of the kernel's log."""
    low = text.lower()
    if "out of memory" in low or "oom-kill" in low or "killed process" in low:
        return Cause("operator", 0.9, OUT_OF_MEMORY.next)
    if "machine check" in low or "hardware error" in low or "nvrm: xid" in low:
        return Cause("hardware", 0.85, "take that host out of the run and let it be tested")
    if "i/o error" in low or "ext4-fs error" in low or ("xfs" in low and "corruption" in low):
        return Cause("hardware", 0.7, BAD_DISK.next)
    return None


def _non_finite(message: str, norms: Sequence[float]) -> Cause:
    if message.startswith(SUMMED) and ", made by" not in message:
        return OF_A_SUM
    if "when it is run again" in message:
        return NOT_AGAIN
    if "but finite in" in message:
        return CORRUPT
    if message.startswith("parameter "):
        return BAD_PARAMETER
    if "no token of this rank" in message:
        return BAD_DATA
    return DIVERGED if _rising(norms) else SUDDEN


def _rising(norms: Sequence[float]) -> bool:
    """Whether the gradient grew before: thirtyfold within two steps in a row, or the mean of the last 3 steps is 5
    times the median of those before."""
    known = [n for n in norms if n is not None]
    if any(a < b < c and c > 30 * a for a, b, c in zip(known, known[1:], known[2:], strict=False)):
        return True
    if len(known) < 8:
        return False
    before = sorted(known[:-3])[len(known[:-3]) // 2]
    return sum(known[-3:]) / 3 > 5 * before
