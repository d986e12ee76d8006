"""Has transformers read a checkpoint's config. Knows nothing of what is made by it."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from octavo.errors import NotMade, first_line


def read_hf_config(directory: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """Return the config of a checkpoint directory as transformers' own class of it.

    Raises:
        NotMade: transformers cannot read it.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # configs check themselves in many ways
        raise NotMade(
            f"transformers cannot read {directory / 'config.json'}: {first_line(error)}"
        ) from None
    return config
