"""Cases that run with `-m long` alone: what they add to their neighbours is little for the minutes of CPU that they cost.

`make test-all` is to take 8 minutes on 2 cores. Each entry is a pytest node id; a name without brackets
means all cases of that test. A case that the command line names (`FILE::TEST`) runs in any case: so do pages and examples
that have changed, which `choose_tests.py` names. README.md of this folder says which case that is left holds which kind.
"""

from __future__ import annotations

import pytest

LONG = {
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_on_eight[replicate2-shard2-tp2]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_on_eight[replicate2-shard2-cp2]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_on_eight[pp2-shard4]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_on_eight[shard8]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_on_eight[pp2-replicate2-shard2]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_two_axes_on_four[shard2-zero1-tp2]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_two_axes_on_four[shard2-zero1-cp2]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_two_axes_on_four[shard2-zero2-pp2]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_two_axes_on_four[replicate2-tp2]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_two_axes_on_four[replicate2-shard2-zero1]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_two_axes_on_four[tp2-cp2]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_one_axis_on_four[tp4]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_one_axis_on_four[shard4-zero1]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_one_axis_on_two[gpt-tp2]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_one_axis_on_two[gpt-shard2]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_batch_norm[shard4]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_batch_norm[replicate2-shard2-zero2]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_batch_norm[shard4-zero1]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_recomputed[blocks-shard2]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_recomputed[selective-tp2]",
    "packages/paceline-large/tests/ranks/test_reshard.py::test_any_layout_is_taken_up_under_any_other_in_all_pairs",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[window-shard-tp]",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[window-replicate-tp]",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[window-replicate-shard]",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[window-tp-pp]",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[plain-pp-shard]",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_under_another_layout[tp-pp]",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_under_another_layout[replicate-tp]",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_under_another_layout[replicate-shard]",
    "packages/paceline-large/tests/ranks/test_state_under_plans.py::test_a_checkpoint_goes_on_as_if_nothing_had_happened[replicate2-shard2]",
    "packages/paceline-large/tests/ranks/test_state_under_plans.py::test_a_frozen_teacher_under_another_plan[replicate2-shard2]",
    "packages/paceline-large/tests/ranks/test_state_under_plans.py::test_a_checkpoint_of_one_process_is_taken_up[replicate2-shard2]",
    "packages/paceline-large/tests/ranks/test_state_under_plans.py::test_two_models_that_train_against_each_other[replicate2-shard2]",
    "packages/paceline-large/tests/ranks/test_state_under_plans.py::test_evaluation_over_a_last_batch_that_is_not_full[replicate2-shard2]",
    "packages/paceline-large/tests/ranks/test_state_under_plans.py::test_an_average_of_the_weights[replicate2-shard2]",
    "packages/paceline/tests/ranks/test_shard.py::test_optimizers[NAdam]",
    "packages/paceline/tests/ranks/test_shard.py::test_optimizers[Adagrad]",
    "packages/paceline/tests/ranks/test_shard.py::test_four[hybrid]",
    "packages/paceline/tests/ranks/test_resume.py::test_the_rest_has_the_same_losses[augmented]",
    "packages/paceline/tests/ranks/test_resume.py::test_the_rest_has_the_same_losses[stream]",
    "packages/paceline/tests/ranks/test_resume.py::test_the_rest_has_the_same_losses[stateful]",
    "packages/paceline/tests/ranks/test_resume.py::test_the_rest_has_the_same_losses[workers]",
    "packages/paceline/tests/ranks/test_background_save.py::test_a_launcher_hears_of_a_last_save_that_failed[torchrun]",
    "packages/paceline/tests/ranks/test_background_save.py::test_the_process_ends_after_its_save[exception]",
    "packages/paceline/tests/ranks/test_background_save.py::test_the_process_ends_after_its_save[function]",
    "packages/paceline-large/tests/ranks/test_pipeline.py::test_beside_data_parallel[zbv-replicate]",
    "packages/paceline-large/tests/ranks/test_pipeline.py::test_beside_data_parallel[1f1b-replicate]",
    "packages/paceline-large/tests/ranks/test_tensor.py::test_together_with_shards_of_the_divided_parameters",
    "packages/paceline-hosts/tests/ranks/test_launch_nodes.py::test_torchelastic_reports_the_failing_rank",
    "packages/paceline-hosts/tests/ranks/test_launch_nodes.py::test_two_nodes_of_unequal_size",
    "packages/paceline/tests/ranks/test_launch_local.py::test_the_script_is_main_as_under_python[exec]",
    "packages/paceline-hosts/tests/ranks/test_launch_kubernetes.py::test_the_launcher_in_a_pod_finds_its_world[pytorchjob]",
    "packages/paceline-hosts/tests/ranks/test_launch_kubernetes.py::test_a_bare_script_in_a_pod_finds_its_world[pytorchjob]",
    "packages/paceline-lens/tests/ranks/test_tune.py::test_the_autotuning_key",
    "packages/paceline-lens/tests/ranks/test_hang_reports.py::test_the_launcher_names_the_rank_that_left_first_with_its_code[1-os._exit(0)]",
    "packages/paceline-hosts/tests/ranks/test_launch_strangers.py::test_a_run_among_strangers[2000-yes]",
    "tests/docs/test_examples.py::test_images_are_classified_from_a_notebook",
    "tests/docs/test_examples.py::test_the_loop_as_a_notebook_is_the_script_and_runs",
    "tests/docs/test_chaos.py::test_three_kills_change_nothing",
    "tests/hosts/test_slurm.py::test_the_page",
    "tests/hosts/test_slurm.py::test_a_failing_rank",
    "tests/hosts/test_store_off_hosts.py::test_each_of_two_hosts_outlives_the_other[etcd-0-words0]",
    "tests/hosts/test_store_off_hosts.py::test_each_of_two_hosts_outlives_the_other[etcd-1-words1]",
    "tests/hosts/test_launch_hosts.py::test_deepspeeds_flags_and_some_slots",
    "tests/hosts/test_launch_ray.py::test_a_function_from_a_driver",
    "packages/paceline-accelerate/tests/compat/test_scripts.py::test_image_classification[2]",
    "packages/paceline-hosts/tests/ranks/test_launch_kubernetes.py::test_pods_that_are_deleted_save_first",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_under_another_layout[pp-shard]",
    "packages/paceline-large/tests/ranks/test_activation_offload.py::test_the_same_bits[{'tp': 2}]",
    "packages/paceline-large/tests/ranks/test_activation_offload.py::test_the_same_bits[{'cp': 2}]",
    "packages/paceline-large/tests/ranks/test_model_axes.py::test_drawn_models_have_the_numbers_of_one_process[{'tp': 4}]",
    "packages/paceline-large/tests/ranks/test_model_axes.py::test_drawn_models_have_the_numbers_of_one_process[{'tp': 3}]",
    "packages/paceline-large/tests/ranks/test_model_axes.py::test_drawn_models_have_the_numbers_of_one_process[{'pp': 3}]",
    "packages/paceline-large/tests/ranks/test_model_axes.py::test_drawn_models_have_the_numbers_of_one_process[{'cp': 3}]",
    "packages/paceline-large/tests/ranks/test_model_axes.py::test_drawn_models_have_the_numbers_of_one_process[{'tp': 2, 'shard': 2}]",  # noqa: E501
    "packages/paceline-accelerate/tests/ranks/test_divided_models.py::test_a_divided_model_generates_and_is_saved_whole[plan1]",
    "packages/paceline-accelerate/tests/compat/test_loaders.py::test_as_recorded[3]",
    # Since November 29, for a default run of 8 minutes; tests/README.md says which case that is left holds which kind.
    "tests/docs/test_examples.py::test_sentences_are_told_apart_alike_on_one_process_and_two",
    "tests/docs/test_examples.py::test_a_deepspeed_program_learns_alike_on_one_process_and_two_and_writes_what_its_config_asks",
    "tests/docs/test_examples.py::test_a_language_model_is_trained_by_the_trainer_alike_on_one_process_and_two",
    "tests/docs/test_examples.py::test_the_same_with_a_loop_of_ones_own_goes_on_at_another_width",
    "tests/docs/test_examples.py::test_an_adapter_is_trained_and_merged",
    "tests/docs/test_examples.py::test_the_loop_gives_the_same_accuracies_on_one_process_and_two",
    "tests/docs/test_examples.py::test_losses_are_those_of_one_process",
    "tests/docs/test_examples.py::test_an_interrupted_run_resumes_at_another_width_with_the_same_losses",
    "tests/docs/test_examples.py::test_it_learns_in_half_precision",
    "tests/hosts/test_launch_ray.py::test_a_node_with_other_versions_and_one_without_the_script",
    "tests/hosts/test_launch_ray.py::test_the_first_failing_rank",
    "tests/hosts/test_launch_ray.py::test_ctrl_c_ends_everything",
    "tests/hosts/test_doctor_hosts.py::test_a_firewall_a_dead_name_server_and_a_host_that_is_off",
    "tests/hosts/test_slurm.py::test_a_batch_script_of_ones_own",
    "tests/hosts/test_slurm.py::test_a_shell_with_an_allocation",
    "tests/parts/test_parts.py::test_the_core_trains_under_mpirun",
    "tests/parts/test_parts.py::test_the_core_trains_as_tasks_of_srun",
    "packages/paceline-accelerate/tests/compat/test_loaders.py::test_as_recorded[1]",
    "tests/together/test_deepspeed_trainer.py::test_as_the_real_one[stage 1, their optimizer]",
    "packages/paceline/tests/ranks/test_launch_notebook.py::test_in_a_real_notebook",
    "packages/paceline-deepspeed/tests/ranks/test_deepspeed_surroundings.py::test_whole_weights_of_a_checkpoint_of_ours",
    "packages/paceline-hosts/tests/ranks/test_remote_checkpoint.py::test_one_rank_is_killed_while_it_uploads",
    "packages/paceline/tests/ranks/test_several_runs.py::test_two_writers_are_killed_again_and_again[two renames]",
    "packages/paceline-large/tests/ranks/test_reshard_odd.py::test_everything_goes_on_with_the_same_bits[replicate2-no]",
    "packages/paceline-large/tests/ranks/test_reshard_odd.py::test_everything_goes_on_with_the_same_bits[shard2-no]",
    "packages/paceline-large/tests/ranks/test_reshard_odd.py::test_everything_goes_on_with_the_same_bits[shard2-zero1-fp16]",
    "packages/paceline-large/tests/ranks/test_reshard_odd.py::test_everything_goes_on_with_the_same_bits[shard2-zero2-no]",
    "packages/paceline-large/tests/ranks/test_reshard_odd.py::test_everything_goes_on_with_the_same_bits[tp2-fp16]",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[window-replicate3]",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[window-zero1]",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[plain-replicate2]",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[plain-shard2]",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[fp16-replicate2]",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_with_the_same_bits[fp16-zero2]",
    "packages/paceline/tests/ranks/test_background_save.py::test_what_is_written_is_what_was_there[{'replicate': 2}]",
    "packages/paceline/tests/ranks/test_background_save.py::test_what_is_written_is_what_was_there[{'shard': 2, 'zero': 1}]",
    # A second round, for the same 8 minutes. Jobs of their own in CI have mypy (`make check`) and the built site (`make docs`).
    "tests/shape/test_types.py::test_a_type_checker_sees_each_name_and_keeps_the_types_of_what_is_prepared",
    "tests/shape/test_types.py::test_the_package_has_no_error_of_types",
    "tests/docs/test_site.py::test_the_site_builds_strictly",
    "tests/docs/test_site.py::test_a_page_needs_nothing_from_elsewhere",
    "tests/docs/test_site.py::test_search_works_without_a_server",
    "tests/docs/test_site.py::test_decisions_are_reached_by_contributors_alone",
    "packages/paceline/tests/ranks/test_reduction.py::test_programs_train_as_on_one_process[replicate-3]",
    "packages/paceline/tests/ranks/test_reduction.py::test_programs_train_as_on_one_process[zero 1-2]",
    "packages/paceline/tests/ranks/test_reduction.py::test_programs_train_as_on_one_process[zero 2-2]",
    "packages/paceline-large/tests/ranks/test_packing.py::test_the_same_steps_as_document_by_document[2]",
    "packages/paceline/tests/ranks/test_whole_answers.py::test_hooks_on_gradients_get_the_mean_of_all_ranks[clamped-one_pass_each]",
    "packages/paceline/tests/ranks/test_whole_answers.py::test_hooks_on_gradients_get_the_mean_of_all_ranks[masked-two_passes_each]",
    "packages/paceline-large/tests/ranks/test_fp8.py::test_a_resumed_run_has_the_same_numbers[{'zero': 2}]",
    "packages/paceline-large/tests/ranks/test_fp8.py::test_a_resumed_run_has_the_same_numbers[{}]",
    "packages/paceline-large/tests/ranks/test_fp8.py::test_compiled_blocks_have_the_same_numbers[{'pp': 2, 'recompute': 'blocks'}]",  # noqa: E501
    "packages/paceline-large/tests/ranks/test_fp8.py::test_compiled_blocks_have_the_same_numbers[{}]",
    "packages/paceline-large/tests/ranks/test_fp8.py::test_recipes_that_keep_the_numbers_do_so_under_each_plan[{'pp': 2, 'recompute': 'blocks'}]",  # noqa: E501
    "packages/paceline-large/tests/ranks/test_fp8.py::test_recipes_that_keep_the_numbers_do_so_under_each_plan[{'zero': 3}]",
    "packages/paceline-large/tests/ranks/test_export.py::test_files_are_those_of_one_process_and_go_into_any_layout[tp2]",
    "packages/paceline-large/tests/ranks/test_export.py::test_files_are_those_of_one_process_and_go_into_any_layout[pp2]",
    "packages/paceline-large/tests/ranks/test_export.py::test_files_are_those_of_one_process_and_go_into_any_layout[replicate2-shard2]",
    "packages/paceline-large/tests/ranks/test_model_axes.py::test_drawn_models_have_the_numbers_of_one_process[{'pp': 2, 'shard': 2}]",  # noqa: E501
    "packages/paceline-large/tests/ranks/test_model_axes.py::test_drawn_models_have_the_numbers_of_one_process[{'pp': 4}]",
    "packages/paceline-large/tests/ranks/test_mixtures.py::test_as_on_one_process[4-{'tp': 2, 'shard': 2}]",
    "packages/paceline/tests/ranks/test_resume.py::test_the_rest_has_the_same_losses[batch sampler]",
    "packages/paceline/tests/ranks/test_resume.py::test_the_rest_has_the_same_losses[dispatched]",
    "packages/paceline/tests/ranks/test_resume.py::test_the_rest_has_the_same_losses[sampler]",
    "packages/paceline-large/tests/ranks/test_tensor.py::test_more_ranks_than_key_value_heads[4-options1]",
    "packages/paceline-large/tests/ranks/test_pipeline_values.py::test_hidden_states_are_used_around_the_blocks[plan1]",
    "packages/paceline-accelerate/tests/compat/test_fsdp_files.py::test_a_saved_optimizer_goes_on_at_the_same_place[1-Lamb]",
    "packages/paceline-accelerate/tests/compat/test_fsdp_files.py::test_a_saved_optimizer_goes_on_at_the_same_place[1-Lion]",
    "packages/paceline-accelerate/tests/compat/test_fsdp_files.py::test_a_saved_optimizer_goes_on_at_the_same_place[2-Lamb]",
    "packages/paceline-accelerate/tests/compat/test_fsdp_files.py::test_a_saved_optimizer_goes_on_at_the_same_place[3-AdamW]",
    "packages/paceline-accelerate/tests/compat/test_fsdp_files.py::test_a_saved_optimizer_goes_on_at_the_same_place[3-Lion]",
    "tests/together/test_deepspeed_plugin.py::test_a_loop_has_the_numbers_of_ddp[1-stage 1]",
    "tests/together/test_deepspeed_plugin.py::test_a_loop_has_the_numbers_of_ddp[1-stage 3]",
    "tests/together/test_deepspeed_plugin.py::test_a_loop_has_the_numbers_of_ddp[1-offloaded]",
    "packages/paceline-hosts/tests/unit/launch/test_membership_simulation.py::test_every_schedule_keeps_the_promises[250]",
    "packages/paceline-hosts/tests/unit/launch/test_membership_simulation.py::test_every_schedule_keeps_the_promises[750]",
    "packages/paceline-hosts/tests/unit/launch/test_membership_simulation.py::test_every_schedule_with_a_store_keeps_the_promises[250]",
    "packages/paceline-hosts/tests/unit/launch/test_membership_simulation.py::test_every_schedule_with_a_store_keeps_the_promises[750]",
    # A third round, on November 30, by processor time.
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_on_eight[pp2-shard2-tp2]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_batch_norm[replicate4]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_batch_norm[shard4-zero2]",
    "packages/paceline-large/tests/ranks/test_parity_plans.py::test_batch_norm[replicate2-shard2-zero1]",
    "packages/paceline-large/tests/ranks/test_replicas.py::test_a_loss_whose_numbers_depend_on_the_division_is_told[plan3-4]",
    "packages/paceline-large/tests/ranks/test_reshard_window.py::test_the_window_goes_on_under_another_layout[shard-tp]",
    "packages/paceline/tests/ranks/test_collectives.py::test_how_often_the_ranks_talk[3]",
}


# Tests of which the cases with these ids alone are not long.
KEPT = {
    "tests/docs/test_code_blocks.py::test_a_page_runs": (
        "README.md",
        "docs/index.md",
        "docs/tutorial/two-processes.md",
    ),
    "tests/hosts/test_launch_ray.py::test_what_cannot_be_given": (
        "--ray-address-127.0.0.1:1---",
        "--nodes-9---",
        "--no-wait---",
    ),
    "packages/paceline/tests/ranks/test_background_save.py::test_the_process_ends_after_its_save": ("failing",),
    "packages/paceline-accelerate/tests/compat/test_trainer.py::test_trainer": (
        "two processes, accumulation, bf16",
        "zero 2",
        "fsdp",
        "tp",
    ),
}


def mark(items: list[pytest.Item]) -> None:
    """Marks the long cases, but for those that the command line names.

    Raises:
        pytest.UsageError: an entry names no case, though its file was read whole.
    """
    kept = {f"{test}[{case}]" for test, cases in KEPT.items() for case in cases}
    unused = {*LONG, *kept}
    named = {word for word in items[0].config.args if "::" in word}
    for item in items:
        case = item.nodeid
        test = case.partition("[")[0]
        unused -= {case, test}
        is_long = case in LONG or test in LONG or (test in KEPT and case not in kept)
        if is_long and not {case, test} & named:
            item.add_marker(pytest.mark.long)
    reads_whole_files = not named
    files = {item.nodeid.partition("::")[0] for item in items}
    stale = sorted(name for name in unused if reads_whole_files and name.partition("::")[0] in files)
    if stale:
        raise pytest.UsageError(f"tests/long_cases.py names cases that do not exist: {', '.join(stale)}")
