"""A model from the Hugging Face hub, through its own client: resume, tokens and progress are its business."""

from __future__ import annotations

import os
import re
from pathlib import Path

from emberkeep.errors import DownloadFailed
from emberkeep.models.spec import HubFile


def fetch_hub(source: HubFile, folder: Path) -> tuple[Path, str | None]:
    """The file, and the SHA-256 that the hub promises for it, if it does.

    Blocks. What an interrupted call has downloaded stays in `folder` for the next. Raises DownloadFailed.
    """
    # Imported here because it takes half a second, which no other command should pay.
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        url = hf_hub_url(source.repo, source.file, revision=source.revision, endpoint=endpoint)
        seen = get_hf_file_metadata(url, endpoint=endpoint)
        path = hf_hub_download(
            source.repo,
            source.file,
            revision=seen.commit_hash or source.revision,
            local_dir=folder / "hub",
            endpoint=endpoint,
        )
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
    return Path(path), seen.etag if re.fullmatch("[0-9a-f]{64}", seen.etag or "") else None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
