//! The metrics of one backend and kind: looked up once, then only counted.

#[cfg(feature = "metrics")]
pub(super) use self::on::Meters;

#[cfg(not(feature = "metrics"))]
pub(super) use self::off::Meters;

#[cfg(feature = "metrics")]
mod on {
    use std::fmt::{self, Debug};
    use std::time::Duration;

    use metrics::{
        Counter, Gauge, Histogram, Unit, counter, describe_counter, describe_gauge,
        describe_histogram, gauge, histogram,
    };

    use super::super::{AdmitEnd, CallEnd, CommitEnd, HoldEnd, Loss, RenewalEnd};
    use crate::inspect::Kind;

    /// Each list in the order of its labels; empty where the kind has none.
    pub(crate) struct Meters {
        acquisitions: Vec<Counter>,
        waits: Vec<Histogram>,
        admissions: Vec<Counter>,
        renewals: Vec<Counter>,
        commits: Vec<Counter>,
        releases: Vec<Counter>,
        losses: Vec<Counter>,
        held: Gauge,
        holds: Histogram,
    }

    impl Debug for Meters {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("Meters").finish_non_exhaustive()
        }
    }

    impl Meters {
        pub(crate) fn new(backend: &'static str, kind: Kind) -> Self {
            describe();
            let name = kind.as_str();
            let admits = kind == Kind::Dedupe;
            let renews = matches!(kind, Kind::Lock | Kind::Lease);
            let commits = kind == Kind::Claim;
            Self {
                acquisitions: handles(!admits, CallEnd::ALL, |outcome| {
                    let outcome = outcome.as_str();
                    counter!("leasehold_acquisitions_total", "backend" => backend, "kind" => name, "outcome" => outcome)
                }),
                waits: handles(!admits, CallEnd::ALL, |outcome| {
                    let outcome = outcome.as_str();
                    histogram!("leasehold_wait_seconds", "backend" => backend, "kind" => name, "outcome" => outcome)
                }),
                admissions: handles(
                    admits,
                    AdmitEnd::ALL,
                    |outcome| counter!("leasehold_admissions_total", "backend" => backend, "outcome" => outcome.as_str()),
                ),
                renewals: handles(
                    renews,
                    RenewalEnd::ALL,
                    |outcome| counter!("leasehold_renewals_total", "backend" => backend, "outcome" => outcome.as_str()),
                ),
                commits: handles(
                    commits,
                    CommitEnd::ALL,
                    |outcome| counter!("leasehold_commits_total", "backend" => backend, "outcome" => outcome.as_str()),
                ),
                releases: handles(true, HoldEnd::ALL, |outcome| {
                    let outcome = outcome.as_str();
                    counter!("leasehold_releases_total", "backend" => backend, "kind" => name, "outcome" => outcome)
                }),
                losses: handles(true, Loss::ALL, |reason| {
                    let reason = reason.as_str();
                    counter!("leasehold_losses_total", "backend" => backend, "kind" => name, "reason" => reason)
                }),
                held: gauge!("leasehold_held", "backend" => backend, "kind" => name),
                holds: histogram!("leasehold_hold_seconds", "backend" => backend, "kind" => name),
            }
        }

        pub(crate) fn acquired(&self, outcome: CallEnd, wait: Duration) {
            count(&self.acquisitions, outcome as usize);
            if let Some(waits) = self.waits.get(outcome as usize) {
                waits.record(wait.as_secs_f64());
            }
        }

        pub(crate) fn admitted(&self, outcome: AdmitEnd) {
            count(&self.admissions, outcome as usize);
        }

        pub(crate) fn renewed(&self, outcome: RenewalEnd) {
            count(&self.renewals, outcome as usize);
        }

        pub(crate) fn committed(&self, outcome: CommitEnd) {
            count(&self.commits, outcome as usize);
        }

        pub(crate) fn released(&self, outcome: HoldEnd) {
            count(&self.releases, outcome as usize);
        }

        pub(crate) fn lost(&self, reason: Loss) {
            count(&self.losses, reason as usize);
        }

        pub(crate) fn holds(&self) {
            self.held.increment(1.0);
        }

        pub(crate) fn holds_not(&self) {
            self.held.decrement(1.0);
        }

        pub(crate) fn holds_no_more(&self, held: Duration) {
            self.held.decrement(1.0);
            self.holds.record(held.as_secs_f64());
        }
    }

    fn handles<L: Copy, H>(wanted: bool, labels: &[L], handle: impl Fn(L) -> H) -> Vec<H> {
        labels.iter().filter(|_| wanted).map(|label| handle(*label)).collect()
    }

    fn count(counters: &[Counter], index: usize) {
        if let Some(counter) = counters.get(index) {
            counter.increment(1);
        }
    }

    fn describe() {
        let calls = "calls of lock, lease and claim";
        describe_counter!("leasehold_acquisitions_total", Unit::Count, calls);
        let keys = "keys that were asked for to dedupe";
        describe_counter!("leasehold_admissions_total", Unit::Count, keys);
        let ended = "holds that ended as wanted";
        describe_counter!("leasehold_releases_total", Unit::Count, ended);
        let lost = "holds that were lost";
        describe_counter!("leasehold_losses_total", Unit::Count, lost);
        let renewals = "renewals, one per lease";
        describe_counter!("leasehold_renewals_total", Unit::Count, renewals);
        let commits = "commits of claims";
        describe_counter!("leasehold_commits_total", Unit::Count, commits);
        let held = "locks, leases, claims and dedupe entries that are held";
        describe_gauge!("leasehold_held", Unit::Count, held);
        let wait = "time from the call of lock, lease or claim to its end";
        describe_histogram!("leasehold_wait_seconds", Unit::Seconds, wait);
        let hold = "time from the acquisition to the end of the hold";
        describe_histogram!("leasehold_hold_seconds", Unit::Seconds, hold);
    }
}

#[cfg(not(feature = "metrics"))]
mod off {
    use std::time::Duration;

    use super::super::{AdmitEnd, CallEnd, CommitEnd, HoldEnd, Loss, RenewalEnd};
    use crate::inspect::Kind;

    /// Nothing.
    #[derive(Debug)]
    pub(crate) struct Meters;

    #[allow(clippy::unused_self)] // as the other one
    impl Meters {
        pub(crate) fn new(_: &'static str, _: Kind) -> Self {
            Self
        }

        pub(crate) fn acquired(&self, _: CallEnd, _: Duration) {}

        pub(crate) fn admitted(&self, _: AdmitEnd) {}

        pub(crate) fn renewed(&self, _: RenewalEnd) {}

        pub(crate) fn committed(&self, _: CommitEnd) {}

        pub(crate) fn released(&self, _: HoldEnd) {}

        pub(crate) fn lost(&self, _: Loss) {}

        pub(crate) fn holds(&self) {}

        pub(crate) fn holds_not(&self) {}

        pub(crate) fn holds_no_more(&self, _: Duration) {}
    }
}
