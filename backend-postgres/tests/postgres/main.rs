//! What only PostgreSQL does, on both versions: `pg15::…` and `pg18::…`.
//!
//! `B…` are the numbers of a collection of failures that people have reported of such locks.

#[path = "../support/mod.rs"]
mod support;

mod claims;
mod diagnose;
mod env;
mod faults;
mod inspect;
mod keys;
mod leases;
mod limits;
mod pooler;
mod schema;
mod sessions;
#[cfg(feature = "rustls")]
mod tls;

/// Makes a test for each version of each `async fn(&Env)`.
macro_rules! on_both {
    ($($module:ident::{$($case:ident),* $(,)?})*) => {
        mod pg15 {
            use leasehold_conformance::servers::Kind;
            $($(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    crate::$module::$case(&crate::env::Env::new(Kind::Postgres15)).await;
                }
            )*)*
        }
        mod pg18 {
            use leasehold_conformance::servers::Kind;
            $($(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    crate::$module::$case(&crate::env::Env::new(Kind::Postgres18)).await;
                }
            )*)*
        }
    };
}

on_both! {
    sessions::{
        an_ended_idle_session_is_noticed_at_once,
        time_outs_of_the_role_end_no_hold_and_no_wait,
        a_wait_goes_on_when_its_session_is_ended,
        batches_go_on_when_sessions_are_ended,
        a_long_wait_holds_back_no_vacuum,
        a_waiter_that_vanished_leaves_the_queue,
        an_outdated_kill_hits_nobody,
        tiny_waits_are_short,
        locks_are_seen_in_the_servers_view,
        a_batch_draws_one_token_and_a_wait_none,
    }
    claims::{
        nothing_leaks_to_the_pool,
        the_callers_limits_hold_within_a_claim,
        cancelled_claims_poison_no_connection,
        a_cut_idle_connection_is_replaced,
        an_aborted_transaction_never_counts_as_committed,
        claims_in_the_callers_transaction,
        crossed_claims_in_transactions_end_in_a_deadlock,
        a_snapshot_older_than_the_lock_is_refused,
        an_exhausted_pool_is_told,
        holders_need_no_second_connection,
        a_cancelled_wait_leaves_the_queue,
        a_durable_commit,
    }
    leases::{
        expiry_is_counted_from_when_the_row_was_ours,
        a_missed_notification_is_made_up_for,
        a_jump_of_the_servers_clock_makes_no_second_holder,
        time_zones_do_not_matter,
        renewals_go_on_while_a_guarded_transaction_is_open,
        ten_thousand_leases_are_renewed_in_few_statements,
        an_open_transaction_is_waited_for,
        an_answer_while_rows_come_and_go,
        rows_do_not_pile_up,
        connections_that_are_cut_between_calls_are_replaced,
        the_pool_has_all_its_connections_for_others,
    }
    keys::{
        hashtext_is_the_servers,
        a_lock_is_shared_with_hashtext,
        extreme_numbers_are_locks_like_others,
        databases_are_apart_and_schemas_are_not,
        tokens_rise_across_purges,
    }
    limits::{
        a_handle_keeps_to_its_share_of_the_lock_table,
        a_full_lock_table_ends_no_hold,
        a_standby_is_refused,
        no_message_tells_a_password,
        drops_after_the_runtime_do_not_panic,
    }
    schema::{
        twenty_migrate_at_once,
        missing_tables_are_told,
        the_granted_role_needs_no_more,
        a_newer_schema_is_left_alone,
        tables_of_version_1_are_upgraded,
    }
    pooler::{
        a_pooler_refuses_named_locks_only,
        sessions_go_past_a_pooler,
    }
    inspect::{
        all_four_are_shown_with_their_holders,
        a_name_of_the_users_is_shown_with_the_connection,
        what_is_released_by_force_is_lost,
        who_listens_hears_of_a_lease_taken_by_force,
        another_roles_session_needs_a_privilege_to_end,
        the_row_shows_the_holders_token,
        a_slow_insertion_is_not_overtaken,
        one_number_for_both_kinds,
    }
    diagnose::{
        a_good_server_has_no_fault,
        a_pooler_in_transaction_mode_is_found,
        settings_of_the_role_are_found,
        missing_grants_are_found,
        missing_and_old_tables_are_found,
        a_standby_and_a_full_lock_table_are_found,
    }
    faults::{
        five_hundred_cancelled_acquires_leave_nothing,
        a_killed_server_loses_the_locks_and_keeps_the_tokens,
    }
}
