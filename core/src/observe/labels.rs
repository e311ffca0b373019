//! The values of fields and labels.

use crate::lost::LossReason;

/// Values of a field and label, in an order that counts them.
macro_rules! labels {
    ($(#[$doc:meta])* $name:ident { $($variant:ident = $label:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum $name { $($variant),+ }

        impl $name {
            #[cfg(feature = "metrics")]
            pub(super) const ALL: &[Self] = &[$(Self::$variant),+];

            #[cfg_attr(not(feature = "metrics"), allow(dead_code))] // a label only
            pub(crate) fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $label),+ }
            }
        }
    };
}

labels!(
    /// How a call for a lock, lease or claim ended.
    CallEnd { Acquired = "acquired", Busy = "busy", Error = "error", Cancelled = "cancelled" }
);
labels!(
    /// How the question for one key to dedupe ended.
    AdmitEnd {
        First = "first",
        InProgress = "in_progress",
        Done = "done",
        Error = "error",
        Cancelled = "cancelled",
    }
);
labels!(
    /// How a hold ended that was not lost.
    HoldEnd {
        Released = "released",
        Dropped = "dropped",
        Committed = "committed",
        RolledBack = "rolled_back",
        Completed = "completed",
        Abandoned = "abandoned",
        Unconfirmed = "unconfirmed",
    }
);
labels!(
    /// Why a hold was lost.
    Loss {
        SessionEnded = "session_ended",
        Silent = "silent",
        Expired = "expired",
        Taken = "taken",
        Closed = "closed",
        RuntimeEnded = "runtime_ended",
    }
);
labels!(
    /// How a commit ended.
    CommitEnd { Committed = "committed", Lost = "lost", Unknown = "unknown", Error = "error" }
);
labels!(
    /// How the renewal of one lease ended.
    RenewalEnd { Renewed = "renewed", Lost = "lost", Error = "error" }
);

impl From<LossReason> for Loss {
    fn from(reason: LossReason) -> Self {
        match reason {
            LossReason::SessionEnded => Self::SessionEnded,
            LossReason::Silent => Self::Silent,
            LossReason::Expired => Self::Expired,
            LossReason::Taken => Self::Taken,
            LossReason::Closed => Self::Closed,
        }
    }
}
