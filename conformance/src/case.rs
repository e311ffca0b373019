//! [`Case`]: one promise, and how it is put to the test.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use crate::ctx::Ctx;
use crate::fault::Verdict;
use crate::harness::Need;

/// What a case is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Subject {
    /// [`NamedLock`](leasehold_core::NamedLock).
    NamedLock,
    /// [`Lease`](leasehold_core::Lease).
    Lease,
    /// [`ClaimLock`](leasehold_core::ClaimLock).
    ClaimLock,
    /// [`Dedupe`](leasehold_core::Dedupe).
    Dedupe,
    /// More than one of them, or the handle.
    Backend,
    /// A recipe of the crate `leasehold`, over one of them.
    Recipes,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

type Run = fn(Ctx) -> Pin<Box<dyn Future<Output = Verdict> + Send>>;

/// One case of the suite.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Case {
    /// The file of the case and its name, e.g. `named::excludes`.
    pub name: &'static str,
    /// What is promised, in one line.
    pub about: &'static str,
    /// The trait that promises it.
    pub subject: Subject,
    /// What the case needs of a harness.
    pub needs: &'static [Need],
    /// Puts it to the test.
    pub run: Run,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case")
            .field("name", &self.name)
            .field("about", &self.about)
            .finish_non_exhaustive()
    }
}

/// The table of a file of cases: the trait, the prefix of the names, and for each case its function
/// (with an argument, if it is shared between traits), its promise and its needs.
macro_rules! cases {
    ($subject:ident in $module:literal { $(
        $run:ident $(($arg:expr))? = $about:literal $([$($need:ident),+])?;
    )+ }) => {
        pub(super) const CASES: &[$crate::case::Case] = &[$($crate::case::Case {
            name: concat!($module, "::", stringify!($run)),
            about: $about,
            subject: $crate::case::Subject::$subject,
            needs: &[$($($crate::harness::Need::$need),+)?],
            run: |ctx| Box::pin($run(ctx $(, $arg)?)),
        }),+];
    };
}
pub(crate) use cases;
