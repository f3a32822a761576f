"""Cases that run with `-m long` alone: what they add to their neighbours is little for the minutes of CPU that they cost.

`make test-all` is to take 8 minutes on 2 cores. Each entry is a pytest node id below this folder; a name without brackets
means all cases of that test. A case that the command line names (`FILE::TEST`) runs in any case: so do pages and examples
that have changed, which `choose_tests.py` names. README.md of this folder says which case that is left holds which kind.
"""

from __future__ import annotations

import pytest

LONG = {
    "ranks/test_parity_plans.py::test_on_eight[replicate2-shard2-tp2]",
    "ranks/test_parity_plans.py::test_on_eight[replicate2-shard2-cp2]",
    "ranks/test_parity_plans.py::test_on_eight[pp2-shard4]",
    "ranks/test_parity_plans.py::test_on_eight[shard8]",
    "ranks/test_parity_plans.py::test_on_eight[pp2-replicate2-shard2]",
    "ranks/test_parity_plans.py::test_two_axes_on_four[shard2-zero1-tp2]",
    "ranks/test_parity_plans.py::test_two_axes_on_four[shard2-zero1-cp2]",
    "ranks/test_parity_plans.py::test_two_axes_on_four[shard2-zero2-pp2]",
    "ranks/test_parity_plans.py::test_two_axes_on_four[replicate2-tp2]",
    "ranks/test_parity_plans.py::test_two_axes_on_four[replicate2-shard2-zero1]",
    "ranks/test_parity_plans.py::test_two_axes_on_four[tp2-cp2]",
    "ranks/test_parity_plans.py::test_one_axis_on_four[tp4]",
    "ranks/test_parity_plans.py::test_one_axis_on_four[shard4-zero1]",
    "ranks/test_parity_plans.py::test_one_axis_on_two[gpt-tp2]",
    "ranks/test_parity_plans.py::test_one_axis_on_two[gpt-shard2]",
    "ranks/test_parity_plans.py::test_batch_norm[shard4]",
    "ranks/test_parity_plans.py::test_batch_norm[replicate2-shard2-zero2]",
    "ranks/test_parity_plans.py::test_batch_norm[shard4-zero1]",
    "ranks/test_parity_plans.py::test_recomputed[blocks-shard2]",
    "ranks/test_parity_plans.py::test_recomputed[selective-tp2]",
    "ranks/test_reshard.py::test_any_layout_is_taken_up_under_any_other_in_all_pairs",
    "ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[window-shard-tp]",
    "ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[window-replicate-tp]",
    "ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[window-replicate-shard]",
    "ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[window-tp-pp]",
    "ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[plain-pp-shard]",
    "ranks/test_reshard_window.py::test_the_window_goes_on_under_another_layout[tp-pp]",
    "ranks/test_reshard_window.py::test_the_window_goes_on_under_another_layout[replicate-tp]",
    "ranks/test_reshard_window.py::test_the_window_goes_on_under_another_layout[replicate-shard]",
    "ranks/test_state_under_plans.py::test_a_checkpoint_goes_on_as_if_nothing_had_happened[replicate2-shard2]",
    "ranks/test_state_under_plans.py::test_a_frozen_teacher_under_another_plan[replicate2-shard2]",
    "ranks/test_state_under_plans.py::test_a_checkpoint_of_one_process_is_taken_up[replicate2-shard2]",
    "ranks/test_state_under_plans.py::test_two_models_that_train_against_each_other[replicate2-shard2]",
    "ranks/test_state_under_plans.py::test_evaluation_over_a_last_batch_that_is_not_full[replicate2-shard2]",
    "ranks/test_state_under_plans.py::test_an_average_of_the_weights[replicate2-shard2]",
    "ranks/test_shard.py::test_optimizers[NAdam]",
    "ranks/test_shard.py::test_optimizers[Adagrad]",
    "ranks/test_shard.py::test_four[hybrid]",
    "ranks/test_resume.py::test_the_rest_has_the_same_losses[augmented]",
    "ranks/test_resume.py::test_the_rest_has_the_same_losses[stream]",
    "ranks/test_resume.py::test_the_rest_has_the_same_losses[stateful]",
    "ranks/test_resume.py::test_the_rest_has_the_same_losses[workers]",
    "ranks/test_background_save.py::test_a_launcher_hears_of_a_last_save_that_failed[torchrun]",
    "ranks/test_background_save.py::test_the_process_ends_after_its_save[exception]",
    "ranks/test_background_save.py::test_the_process_ends_after_its_save[function]",
    "ranks/test_pipeline.py::test_beside_data_parallel[zbv-replicate]",
    "ranks/test_pipeline.py::test_beside_data_parallel[1f1b-replicate]",
    "ranks/test_tensor.py::test_together_with_shards_of_the_divided_parameters",
    "ranks/test_launch_nodes.py::test_torchelastic_reports_the_failing_rank",
    "ranks/test_launch_nodes.py::test_two_nodes_of_unequal_size",
    "ranks/test_launch_local.py::test_the_script_is_main_as_under_python[exec]",
    "ranks/test_launch_kubernetes.py::test_the_launcher_in_a_pod_finds_its_world[pytorchjob]",
    "ranks/test_launch_kubernetes.py::test_a_bare_script_in_a_pod_finds_its_world[pytorchjob]",
    "ranks/test_tune.py::test_the_autotuning_key",
    "ranks/test_hang_reports.py::test_the_launcher_names_the_rank_that_left_first_with_its_code[1-os._exit(0)]",
    "ranks/test_launch_strangers.py::test_a_run_among_strangers[2000-yes]",
    "docs/test_examples.py::test_images_are_classified_from_a_notebook",
    "docs/test_examples.py::test_the_loop_as_a_notebook_is_the_script_and_runs",
    "docs/test_chaos.py::test_three_kills_change_nothing",
    "hosts/test_slurm.py::test_the_page",
    "hosts/test_slurm.py::test_a_failing_rank",
    "hosts/test_store_off_hosts.py::test_each_of_two_hosts_outlives_the_other[etcd-0-words0]",
    "hosts/test_store_off_hosts.py::test_each_of_two_hosts_outlives_the_other[etcd-1-words1]",
    "hosts/test_launch_hosts.py::test_deepspeeds_flags_and_some_slots",
    "hosts/test_launch_ray.py::test_a_function_from_a_driver",
    "compat/test_scripts.py::test_image_classification[2]",
    "ranks/test_launch_kubernetes.py::test_pods_that_are_deleted_save_first",
    "ranks/test_reshard_window.py::test_the_window_goes_on_under_another_layout[pp-shard]",
    "ranks/test_activation_offload.py::test_the_same_bits[{'tp': 2}]",
    "ranks/test_activation_offload.py::test_the_same_bits[{'cp': 2}]",
    "ranks/test_model_axes.py::test_drawn_models_have_the_numbers_of_one_process[{'tp': 4}]",
    "ranks/test_model_axes.py::test_drawn_models_have_the_numbers_of_one_process[{'tp': 3}]",
    "ranks/test_model_axes.py::test_drawn_models_have_the_numbers_of_one_process[{'pp': 3}]",
    "ranks/test_model_axes.py::test_drawn_models_have_the_numbers_of_one_process[{'cp': 3}]",
    "ranks/test_model_axes.py::test_drawn_models_have_the_numbers_of_one_process[{'tp': 2, 'shard': 2}]",
    "ranks/test_divided_models.py::test_a_divided_model_generates_and_is_saved_whole[plan1]",
    "compat/test_loaders.py::test_as_recorded[3]",
    # Since November 29, for a default run of 8 minutes; tests/README.md says which case that is left holds which kind.
    "docs/test_examples.py::test_sentences_are_told_apart_alike_on_one_process_and_two",
    "docs/test_examples.py::test_a_deepspeed_program_learns_alike_on_one_process_and_two_and_writes_what_its_config_asks",
    "docs/test_examples.py::test_a_language_model_is_trained_by_the_trainer_alike_on_one_process_and_two",
    "docs/test_examples.py::test_the_same_with_a_loop_of_ones_own_goes_on_at_another_width",
    "docs/test_examples.py::test_an_adapter_is_trained_and_merged",
    "docs/test_examples.py::test_the_loop_gives_the_same_accuracies_on_one_process_and_two",
    "docs/test_examples.py::test_losses_are_those_of_one_process",
    "docs/test_examples.py::test_an_interrupted_run_resumes_at_another_width_with_the_same_losses",
    "docs/test_examples.py::test_it_learns_in_half_precision",
    "hosts/test_launch_ray.py::test_a_node_with_other_versions_and_one_without_the_script",
    "hosts/test_launch_ray.py::test_the_first_failing_rank",
    "hosts/test_launch_ray.py::test_ctrl_c_ends_everything",
    "hosts/test_doctor_hosts.py::test_a_firewall_a_dead_name_server_and_a_host_that_is_off",
    "hosts/test_slurm.py::test_a_batch_script_of_ones_own",
    "hosts/test_slurm.py::test_a_shell_with_an_allocation",
    "parts/test_parts.py::test_the_core_trains_under_mpirun",
    "parts/test_parts.py::test_the_core_trains_as_tasks_of_srun",
    "compat/test_loaders.py::test_as_recorded[1]",
    "compat/test_deepspeed_trainer.py::test_as_the_real_one[stage 1, their optimizer]",
    "ranks/test_launch_notebook.py::test_in_a_real_notebook",
    "ranks/test_launch_local.py::test_a_second_signal_waits_no_longer_and_grace_has_an_end",
    "ranks/test_deepspeed_surroundings.py::test_whole_weights_of_a_checkpoint_of_ours",
    "ranks/test_remote_checkpoint.py::test_one_rank_is_killed_while_it_uploads",
    "ranks/test_several_runs.py::test_two_writers_are_killed_again_and_again[two renames]",
    "ranks/test_reshard.py::test_any_layout_is_taken_up_under_any_other[zero2]",
    "ranks/test_reshard.py::test_any_layout_is_taken_up_under_any_other[replicate4]",
    "ranks/test_reshard.py::test_any_layout_is_taken_up_under_any_other[interleaved]",
    "ranks/test_reshard_odd.py::test_everything_goes_on_with_the_same_bits[replicate2-no]",
    "ranks/test_reshard_odd.py::test_everything_goes_on_with_the_same_bits[shard2-no]",
    "ranks/test_reshard_odd.py::test_everything_goes_on_with_the_same_bits[shard2-zero1-fp16]",
    "ranks/test_reshard_odd.py::test_everything_goes_on_with_the_same_bits[shard2-zero2-no]",
    "ranks/test_reshard_odd.py::test_everything_goes_on_with_the_same_bits[tp2-fp16]",
    "ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[window-replicate3]",
    "ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[window-zero1]",
    "ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[plain-replicate2]",
    "ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[plain-shard2]",
    "ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[fp16-replicate2]",
    "ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[fp16-zero2]",
    "ranks/test_background_save.py::test_what_is_written_is_what_was_there[{'replicate': 2}]",
    "ranks/test_background_save.py::test_what_is_written_is_what_was_there[{'shard': 2, 'zero': 1}]",
    # A second round, for the same 8 minutes. Jobs of their own in CI have mypy (`make check`) and the built site (`make docs`).
    "shape/test_types.py::test_a_type_checker_sees_each_name_and_keeps_the_types_of_what_is_prepared",
    "shape/test_types.py::test_the_package_has_no_error_of_types",
    "docs/test_site.py::test_the_site_builds_strictly",
    "docs/test_site.py::test_a_page_needs_nothing_from_elsewhere",
    "docs/test_site.py::test_search_works_without_a_server",
    "docs/test_site.py::test_decisions_are_reached_by_contributors_alone",
    "ranks/test_reduction.py::test_programs_train_as_on_one_process[replicate-3]",
    "ranks/test_reduction.py::test_programs_train_as_on_one_process[zero 1-2]",
    "ranks/test_reduction.py::test_programs_train_as_on_one_process[zero 2-2]",
    "ranks/test_packing.py::test_the_same_steps_as_document_by_document[2]",
    "ranks/test_whole_answers.py::test_hooks_on_gradients_get_the_mean_of_all_ranks[clamped-one_pass_each]",
    "ranks/test_whole_answers.py::test_hooks_on_gradients_get_the_mean_of_all_ranks[masked-two_passes_each]",
    "ranks/test_fp8.py::test_a_resumed_run_has_the_same_numbers[{'zero': 2}]",
    "ranks/test_fp8.py::test_a_resumed_run_has_the_same_numbers[{}]",
    "ranks/test_fp8.py::test_compiled_blocks_have_the_same_numbers[{}]",
    "ranks/test_fp8.py::test_recipes_that_keep_the_numbers_do_so_under_each_plan[{'recompute': 'blocks'}]",
    "ranks/test_fp8.py::test_recipes_that_keep_the_numbers_do_so_under_each_plan[{'zero': 3}]",
    "ranks/test_export.py::test_files_are_those_of_one_process_and_go_into_any_layout[tp2]",
    "ranks/test_export.py::test_files_are_those_of_one_process_and_go_into_any_layout[pp2]",
    "ranks/test_export.py::test_files_are_those_of_one_process_and_go_into_any_layout[replicate2-shard2]",
    "ranks/test_model_axes.py::test_drawn_models_have_the_numbers_of_one_process[{'pp': 2, 'shard': 2}]",
    "ranks/test_model_axes.py::test_drawn_models_have_the_numbers_of_one_process[{'pp': 4}]",
    "ranks/test_mixtures.py::test_as_on_one_process[4-{'tp': 2, 'shard': 2}]",
    "ranks/test_resume.py::test_the_rest_has_the_same_losses[batch sampler]",
    "ranks/test_resume.py::test_the_rest_has_the_same_losses[dispatched]",
    "ranks/test_resume.py::test_the_rest_has_the_same_losses[sampler]",
    "ranks/test_shared_gradients.py::test_each_parameter_gets_its_own_gradient[plan1-options1-2]",
    "ranks/test_shared_gradients.py::test_each_parameter_gets_its_own_gradient[plan5-options5-1]",
    "ranks/test_tensor.py::test_more_ranks_than_key_value_heads[4-options1]",
    "ranks/test_pipeline_values.py::test_hidden_states_are_used_around_the_blocks[plan1]",
    "compat/test_fsdp_files.py::test_a_saved_optimizer_goes_on_at_the_same_place[1-Lamb]",
    "compat/test_fsdp_files.py::test_a_saved_optimizer_goes_on_at_the_same_place[1-Lion]",
    "compat/test_fsdp_files.py::test_a_saved_optimizer_goes_on_at_the_same_place[2-Lamb]",
    "compat/test_fsdp_files.py::test_a_saved_optimizer_goes_on_at_the_same_place[3-AdamW]",
    "compat/test_fsdp_files.py::test_a_saved_optimizer_goes_on_at_the_same_place[3-Lion]",
    "compat/test_deepspeed_plugin.py::test_a_loop_has_the_numbers_of_ddp[1-stage 1]",
    "compat/test_deepspeed_plugin.py::test_a_loop_has_the_numbers_of_ddp[1-stage 3]",
    "compat/test_deepspeed_plugin.py::test_a_loop_has_the_numbers_of_ddp[1-offloaded]",
    "unit/launch/test_membership_simulation.py::test_every_schedule_keeps_the_promises[250]",
    "unit/launch/test_membership_simulation.py::test_every_schedule_keeps_the_promises[750]",
    "unit/launch/test_membership_simulation.py::test_every_schedule_with_a_store_keeps_the_promises[250]",
    "unit/launch/test_membership_simulation.py::test_every_schedule_with_a_store_keeps_the_promises[750]",
}


# Tests of which the cases with these ids alone are not long.
KEPT = {
    "docs/test_code_blocks.py::test_a_page_runs": ("README.md", "docs/index.md", "docs/tutorial/two-processes.md"),
    "hosts/test_launch_ray.py::test_what_cannot_be_given": (
        "--ray-address-127.0.0.1:1---",
        "--nodes-9---",
        "--no-wait---",
    ),
    "ranks/test_background_save.py::test_the_process_ends_after_its_save": ("failing",),
    "ranks/test_launch_local.py::test_nobody_is_left_behind": ("kill the launcher", "a rank fails"),
    "compat/test_trainer.py::test_trainer": ("two processes, accumulation, bf16", "zero 2", "fsdp", "tp"),
}


def mark(items: list[pytest.Item]) -> None:
    """Marks the long cases, but for those that the command line names.

    Raises:
        pytest.UsageError: an entry names no case, though its file was read whole.
    """
    kept = {f"{test}[{case}]" for test, cases in KEPT.items() for case in cases}
    unused = {*LONG, *kept}
    named = {word.removeprefix("tests/") for word in items[0].config.args if "::" in word}
    for item in items:
        case = item.nodeid.removeprefix("tests/")
        test = case.partition("[")[0]
        unused -= {case, test}
        is_long = case in LONG or test in LONG or (test in KEPT and case not in kept)
        if is_long and not {case, test} & named:
            item.add_marker(pytest.mark.long)
    reads_whole_files = not named
    files = {item.nodeid.removeprefix("tests/").partition("::")[0] for item in items}
    stale = sorted(name for name in unused if reads_whole_files and name.partition("::")[0] in files)
    if stale:
        raise pytest.UsageError(f"tests/long_cases.py names cases that do not exist: {', '.join(stale)}")
