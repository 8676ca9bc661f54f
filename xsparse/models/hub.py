"""Models of the Hugging Face hub: only the files transformers needs, the local copy first."""

from __future__ import annotations

import logging
from pathlib import Path

from xsparse.models.files import ModelError
from xsparse.models.folder import missing_files

log = logging.getLogger(__name__)

# Repositories often hold the weights again in another format; those are left out.
_WANTED = ["*.json", "*.jinja", "model*.safetensors", "tokenizer.model", "merges.txt"]
_UNWANTED = ["*/*", "consolidated*"]


def local_snapshot(repo_id: str, revision: str | None) -> Path | None:
    """The folder of a complete snapshot in the local hub cache. Asks no network."""
    try:
        folder = _download(repo_id, revision, local_files_only=True)
    except Exception:  # whatever is wrong locally, the hub can still be asked
        return None
    return None if missing_files(folder) else folder


def snapshot(repo_id: str, revision: str | None) -> Path:
    """The folder of a complete snapshot. Without a revision, what was fetched before is kept."""
    if folder := local_snapshot(repo_id, revision):
        return folder
    log.info("downloading %s from the hub, once", repo_id)
    try:
        folder = _download(repo_id, revision, local_files_only=False)
    except Exception as error:  # the client's errors share no base class
        raise _explained(repo_id, revision, error) from error
    if missing := missing_files(folder):
        raise ModelError(f"model.id={repo_id}: the hub's files lack {', '.join(missing)}")
    return folder


def _download(repo_id: str, revision: str | None, *, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    where = snapshot_download(
        repo_id,
        revision=revision,
        allow_patterns=_WANTED,
        ignore_patterns=_UNWANTED,
        local_files_only=local_files_only,
    )
    return Path(str(where))


def config_file(repo_id: str, revision: str | None) -> Path:
    """config.json alone, so that a model can be sized without fetching its weights."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        local = try_to_load_from_cache(repo_id, "config.json", revision=revision)
        if isinstance(local, str):
            return Path(local)
        return Path(hf_hub_download(repo_id, "config.json", revision=revision))
    except Exception as error:
        raise _explained(repo_id, revision, error) from error


def _explained(repo_id: str, revision: str | None, error: Exception) -> ModelError:
    what = f"model.id={repo_id}" + (f" revision={revision}" if revision else "")
    match type(error).__name__:
        case "GatedRepoError":
            why = "the repository is gated: accept its licence on the hub, then `hf auth login`"
        case "RepositoryNotFoundError":
            why = "no such repository on the hub, or a private one without `hf auth login`"
        case "RevisionNotFoundError":
            why = "no such revision"
        case "LocalEntryNotFoundError" | "OfflineModeIsEnabled" | "ConnectError" | "ConnectTimeout":
            why = "not in the local hub cache, and the hub cannot be reached"
        case name:
            first_line = (str(error).strip() or "failed").splitlines()[0]
            why = f"{name}: {first_line}"
    return ModelError(f"{what}: {why}")
