"""Models from the Hugging Face hub, through its own client: resume, tokens and progress are its business."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from emberkeep.errors import DownloadFailed, ModelError
from emberkeep.models.folder import BESIDE_WEIGHTS, CONFIG, WEIGHTS
from emberkeep.models.spec import HubFile, HubRepo

# The client is imported inside functions because that takes half a second, which no other command should pay.


def fetch_hub(source: HubFile, folder: Path) -> tuple[Path, str | None]:
    """The file, and the SHA-256 that the hub promises for it, if it does.

    Blocks. What an interrupted call has downloaded stays in `folder` for the next. Raises DownloadFailed.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    endpoint = os.environ.get("HF_ENDPOINT")
    with _explained(source):
        url = hf_hub_url(source.repo, source.file, revision=source.revision, endpoint=endpoint)
        seen = get_hf_file_metadata(url, endpoint=endpoint)
        path = hf_hub_download(
            source.repo,
            source.file,
            revision=seen.commit_hash or source.revision,
            local_dir=folder / "hub",
            endpoint=endpoint,
        )
    return Path(path), seen.etag if re.fullmatch("[0-9a-f]{64}", seen.etag or "") else None


def fetch_hub_repo(source: HubRepo, folder: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The files of a model, and by name the SHA-256 that the hub promises for those that it does for.

    Blocks. What an interrupted call has downloaded stays in `folder` for the next. Raises ModelError.
    """
    from huggingface_hub import HfApi, snapshot_download

    endpoint = os.environ.get("HF_ENDPOINT")
    with _explained(source):
        seen = HfApi(endpoint).model_info(source.repo, revision=source.revision, files_metadata=True)
        promised = {file.rfilename: file.lfs.sha256 for file in seen.siblings or () if file.lfs}
        wanted = _wanted(source, [file.rfilename for file in seen.siblings or ()])
        path = snapshot_download(
            source.repo, revision=seen.sha, local_dir=folder / "hub", allow_patterns=wanted, endpoint=endpoint
        )
    return [Path(path) / name for name in wanted], promised


def _wanted(source: HubRepo, names: Sequence[str]) -> list[str]:
    """What is needed to run the model. Some repositories hold the same weights twice, under other names."""
    weights = [name for name in names if fnmatchcase(name, WEIGHTS) and "/" not in name]
    weights = [name for name in weights if name.startswith("model")] or weights
    if not weights or CONFIG not in names:
        raise ModelError(
            f"{source.label} holds no model as {CONFIG} and safetensors: choose another, "
            f"or name one file ({source.label}/file.gguf)."
        )
    beside = [n for n in names if "/" not in n and any(fnmatchcase(n, pattern) for pattern in BESIDE_WEIGHTS)]
    return sorted({*weights, *beside})


@contextmanager
def _explained(source: HubFile | HubRepo) -> Iterator[None]:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except ModelError:
        raise
    except OfflineModeIsEnabled as error:
        raise DownloadFailed(f"{source.label} cannot be pulled while HF_HUB_OFFLINE is set: unset it.") from error
    except GatedRepoError as error:
        raise DownloadFailed(
            f"{source.repo} is gated; accept its terms on its page, run `hf auth login` and pull again."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "an error"
        raise DownloadFailed(
            f"The hub answered {status} for {source.label}; check owner, repository, file and revision."
        ) from error
    except Exception as error:
        # The client's HTTP library, and with it what it raises, changes between its versions.
        raise DownloadFailed(
            f"{source.label} could not be downloaded ({_first_line(error)}); pull again to resume."
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
