# SPDX-License-Identifier: Apache-2.0
"""Every private vLLM name that vllm-pyramid touches: the ledger.

Module           Target in vLLM 0.32                         Why                        Remove when
engine_args      EngineArgs.add_cli_args, .from_cli_args,    flags and settings; no     plugins can add
                 .create_engine_config                       hook for plugins           engine arguments
requests         InputProcessor._validate_params             wrong per-request          a hook validates
                                                             settings must answer 400   extra_args
coordinator      kv_cache_manager.get_kv_cache_coordinator   one counter a request for  specs name their
                                                             all layers                 coordinator
side_channel     attributes of ModelRunnerOutput, keys of    worker -> scheduler ->     outputs carry a
                 SchedulerStats.kv_connector_stats           front end                  plugin field
stats            StatLoggerManager.record                    our counters reach         the same
                                                             Prometheus and the log
runner           class of worker.model_runner, V1 and V2     specs, step state          runner_cls exists

The patches of `engine_args` are put in when the plugin loads and do nothing until a policy is
asked for; the rest is put in only then. Subclassing of vLLM's public-by-use classes (scheduler,
worker, attention backend, platform, KV cache spec and manager) happens where they belong.
"""
