# SPDX-License-Identifier: Apache-2.0
"""The data in the pages that `vllm-pyramid show` writes."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np


def read_page(text: str) -> dict[str, Any]:
    """Return the data in a file that `page` made, with `counts` as an `[layers, tokens]` array."""
    start = text.index('type="application/json">') + len('type="application/json">')
    data: dict[str, Any] = json.loads(text[start : text.index("</script>", start)])
    for policy in data["policies"]:
        flat = np.frombuffer(base64.b64decode(policy["counts"]), "<u2")
        policy["counts"] = flat.reshape(len(policy["layers"]), -1)
    return data
