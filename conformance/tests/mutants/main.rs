//! The suite, tested: each of these deliberately broken backends must fail the case that names its
//! fault, and the unbroken memory backend must pass it. `--list` prints the table.

mod backend;
mod driver;

use std::process::ExitCode;
use std::sync::Arc;

use leasehold_conformance::{CASES, Case, Harness, MemoryHarness, Outcome, model, run_case};
use libtest_mimic::{Arguments, Trial};
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};

use crate::backend::MutantHarness;

/// What is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    NoExclusion,
    Reentrant,
    NeverExpires,
    ExpiresEarly,
    StaleReleaseFreesSuccessor,
    RenewalResurrects,
    LockTokenRepeats,
    LeaseTokenRepeats,
    TryWaits,
    WaitHasNoEnd,
    PollsInsteadOfQueueing,
    DropLeaks,
    CancelledAcquireLeaks,
    LossIsNeverTold,
    FoldsCase,
    TrimsSpace,
    CutsLongNames,
    KindsShareASpace,
    NamespacesShareASpace,
    NamespaceRunsIntoTheKey,
    KeysUnsorted,
    LocksTheFirstKeyOnly,
    ClaimsExcludeNobody,
    RollbackKeepsWrites,
    UnknownCommitIsReportedAsDone,
    SeenInRolledBackClaimStays,
    AdmitsDuplicates,
    AcceptsStaleComplete,
    StaleAbandonFreesSuccessor,
    ForgetsDoneEarly,
    NoTakeover,
    SilenceLooksLikeContention,
    NewOwnerForEachTry,
    VerifyAlwaysPasses,
    HousekeepingDeletesTheLive,
    CloseLeavesLeases,
    ShowsWhatIsFree,
    ForcedReleaseOnlyShows,
    ForcedReleaseEndsAllSessions,
    ReleasesAnyToken,
    ReleaseByTokenOnlyShows,
    ReleaseByTokenWakesNobody,
    LeasesExcludeNobody,
    AbandonCompletes,
    TicksAreFirstAgain,
}

const TABLE: &[(Mutant, &str)] = &[
    (Mutant::NoExclusion, "named::excludes"),
    (Mutant::Reentrant, "named::is_not_reentrant"),
    (Mutant::NeverExpires, "expiry::vanished_holder_is_survived"),
    (Mutant::ExpiresEarly, "expiry::frees_a_lease_that_nobody_renews"),
    (Mutant::StaleReleaseFreesSuccessor, "expiry::stale_release_spares_the_successor"),
    (Mutant::RenewalResurrects, "expiry::renewal_never_resurrects"),
    (Mutant::LockTokenRepeats, "named::tokens_rise"),
    (Mutant::LeaseTokenRepeats, "lease::tokens_rise"),
    (Mutant::TryWaits, "named::try_never_waits"),
    (Mutant::WaitHasNoEnd, "named::wait_bounds_everything"),
    (Mutant::PollsInsteadOfQueueing, "named::local_waiters_are_served_in_order"),
    (Mutant::DropLeaks, "named::drop_frees"),
    (Mutant::CancelledAcquireLeaks, "cancel::lock"),
    (Mutant::LossIsNeverTold, "faults::ended_session_loses_its_locks"),
    (Mutant::FoldsCase, "keys::zoo_of_locks"),
    (Mutant::TrimsSpace, "keys::zoo_of_leases"),
    (Mutant::CutsLongNames, "keys::zoo_of_claims"),
    (Mutant::KindsShareASpace, "keys::kinds_never_meet"),
    (Mutant::NamespacesShareASpace, "keys::namespaces_never_meet"),
    (Mutant::NamespaceRunsIntoTheKey, "keys::namespaces_never_meet"),
    (Mutant::KeysUnsorted, "claim::opposite_orders_do_not_deadlock"),
    (Mutant::LocksTheFirstKeyOnly, "claim::sets_are_all_or_nothing"),
    (Mutant::ClaimsExcludeNobody, "claim::counter_on_the_store"),
    (Mutant::RollbackKeepsWrites, "commit::rollback_and_drop_write_nothing"),
    (Mutant::UnknownCommitIsReportedAsDone, "commit::unknown_commit_drops_its_hooks"),
    (Mutant::SeenInRolledBackClaimStays, "commit::first_seen_is_forgotten_by_the_rollback"),
    (Mutant::AdmitsDuplicates, "dedupe::admits_once"),
    (Mutant::AcceptsStaleComplete, "dedupe::stale_owner_cannot_complete"),
    (Mutant::StaleAbandonFreesSuccessor, "dedupe::stale_owner_cannot_abandon"),
    (Mutant::ForgetsDoneEarly, "dedupe::complete_is_kept_for_retain"),
    (Mutant::NoTakeover, "dedupe::unfinished_is_taken_over"),
    (Mutant::SilenceLooksLikeContention, "faults::silence_is_no_contention"),
    (Mutant::NewOwnerForEachTry, "faults::lost_answer_to_an_acquisition"),
    (Mutant::VerifyAlwaysPasses, "expiry::late_write_after_deletion_is_rejected"),
    (Mutant::HousekeepingDeletesTheLive, "expiry::housekeeping_spares_the_live"),
    (Mutant::CloseLeavesLeases, "lifecycle::close_frees_and_tells"),
    (Mutant::ShowsWhatIsFree, "inspect::what_is_free_is_not_shown"),
    (Mutant::ForcedReleaseOnlyShows, "inspect::a_lease_is_taken_away"),
    (Mutant::ForcedReleaseEndsAllSessions, "inspect::nobody_is_displaced_from_what_is_free"),
    (Mutant::ReleasesAnyToken, "by_token::a_successor_is_spared"),
    (Mutant::ReleasesAnyToken, "by_token::one_release_of_many_frees"),
    (Mutant::ReleaseByTokenOnlyShows, "by_token::frees_what_a_dead_holder_left"),
    (Mutant::ReleaseByTokenWakesNobody, "by_token::waiters_are_woken"),
    (Mutant::LeasesExcludeNobody, "lease::excludes"),
    (Mutant::AbandonCompletes, "dedupe::abandon_makes_it_first_again"),
    // what a recipe promises falls with what is beneath it
    (Mutant::NoExclusion, "recipes::leader_is_one"),
    (Mutant::LossIsNeverTold, "recipes::leader_of_an_ended_session_is_told"),
    (Mutant::NoExclusion, "recipes::semaphore_over_locks_is_never_exceeded"),
    (Mutant::LeasesExcludeNobody, "recipes::semaphore_over_leases_is_never_exceeded"),
    (Mutant::LeasesExcludeNobody, "recipes::poller_ticks_one_at_a_time"),
    (Mutant::ClaimsExcludeNobody, "recipes::limit_is_never_exceeded"),
    (Mutant::AbandonCompletes, "recipes::token_that_was_never_issued_stays_unknown"),
    (Mutant::TicksAreFirstAgain, "recipes::schedule_fires_each_tick_once"),
    (Mutant::AdmitsDuplicates, "recipes::takeover_by_exactly_one"),
];

/// Those that the sequential model must find as well, with a short history.
const FOUND_BY_THE_MODEL: &[Mutant] = &[
    Mutant::NoExclusion,
    Mutant::Reentrant,
    Mutant::ExpiresEarly,
    Mutant::StaleReleaseFreesSuccessor,
    Mutant::LockTokenRepeats,
    Mutant::LeaseTokenRepeats,
    Mutant::LossIsNeverTold,
    Mutant::LocksTheFirstKeyOnly,
    Mutant::ClaimsExcludeNobody,
    Mutant::RollbackKeepsWrites,
    Mutant::AdmitsDuplicates,
    Mutant::AcceptsStaleComplete,
    Mutant::StaleAbandonFreesSuccessor,
    Mutant::ForgetsDoneEarly,
    Mutant::NoTakeover,
    Mutant::HousekeepingDeletesTheLive,
];

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads.get_or_insert(8); // they mostly wait
    let trials = TABLE.iter().map(|(mutant, case)| {
        let name = format!("{mutant:?} is caught by {case}");
        Trial::test(name, move || check(*mutant, case).map_err(Into::into))
    });
    let modelled = FOUND_BY_THE_MODEL.iter().map(|mutant| {
        let name = format!("{mutant:?} is found by the model");
        Trial::test(name, move || check_model(*mutant).map_err(Into::into))
    });
    libtest_mimic::run(&args, trials.chain(modelled).collect()).exit_code()
}

fn check_model(mutant: Mutant) -> Result<(), String> {
    let config = Config { cases: 2000, failure_persistence: None, ..Config::default() };
    let found = TestRunner::new(config).run(&model::operations(40), |operations| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .map_err(|error| TestCaseError::fail(error.to_string()))?;
        runtime
            .block_on(model::run(&MutantHarness::new(mutant), &operations))
            .map_err(|fault| TestCaseError::fail(fault.message().to_owned()))
    });
    match found {
        // shrunk as far as one step at a time goes
        Err(TestError::Fail(_, history)) if history.len() <= 16 => Ok(()),
        Err(TestError::Fail(reason, history)) => {
            Err(format!("expected a short history, it has {} steps: {reason}", history.len()))
        }
        other => Err(format!("expected the model to find the mutant: {other:?}")),
    }
}

fn check(mutant: Mutant, name: &str) -> Result<(), String> {
    let case: &Case =
        CASES.iter().find(|case| case.name == name).ok_or_else(|| format!("no case {name}"))?;
    let broken: Arc<dyn Harness> = Arc::new(MutantHarness::new(mutant));
    match run_case(case, &broken) {
        Outcome::Failed(_) => {}
        other => return Err(format!("expected {name} to catch the mutant, it {other:?}")),
    }
    let sound: Arc<dyn Harness> = Arc::new(MemoryHarness::new());
    match run_case(case, &sound) {
        Outcome::Passed => Ok(()),
        other => Err(format!("expected {name} to pass on the unbroken backend, it {other:?}")),
    }
}
