# SPDX-License-Identifier: Apache-2.0
"""A request's own settings are checked in the front end, where a mistake can be answered.

Target: `InputProcessor._validate_params`. Why: what is wrong with `vllm_xargs` would otherwise be
found in the engine core, where an exception ends the engine instead of the request.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from vllm_pyramid.config import KVSettings, RequestOverride, resolve


def install() -> None:
    """Put the wrapper in place. Idempotent; engines without a policy are not affected."""
    if getattr(InputProcessor, "_vllm_pyramid", False):
        return
    validate_params = InputProcessor._validate_params

    @functools.wraps(validate_params)
    def validate_params_and_override(
        self: InputProcessor, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = validate_params(self, params, *args, **kwargs)
        settings = KVSettings.from_additional_config(self.vllm_config.additional_config)
        policy = settings.policy() if settings is not None else None
        if policy is not None and isinstance(params, SamplingParams) and params.extra_args:
            try:
                resolve(policy, RequestOverride.parse(params.extra_args))
            except ValueError as error:
                raise VLLMValidationError(str(error), parameter="vllm_xargs") from None
        return result

    InputProcessor._validate_params = validate_params_and_override  # type: ignore[method-assign]
    InputProcessor._vllm_pyramid = True  # type: ignore[attr-defined]
