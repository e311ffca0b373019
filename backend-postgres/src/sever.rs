//! [`Severed`]: what closes its connection here and now when it is dropped half-way.

use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll};

use tokio::runtime::{Builder, Handle};

/// Wraps a connection of sqlx, or something that owns one, such as a transaction.
///
/// sqlx gives a dropped connection back to its pool in a task of its own. That is wrong for one in
/// the middle of a statement: the task waits for the statement, the pool lacks the connection, and
/// what the statement got (a lock, a begun transaction) belongs to nobody. Dropping this instead
/// closes the socket at once and frees the place in the pool; [`into_inner`](Self::into_inner)
/// says that all is well.
#[derive(Debug)]
pub(crate) struct Severed<T>(Option<T>);

/// A future that owns a connection.
pub(crate) type SeveredFuture<T> = Severed<Pin<Box<dyn Future<Output = T> + Send>>>;

impl<T> Severed<T> {
    pub(crate) fn new(inner: T) -> Self {
        Self(Some(inner))
    }

    /// From here on it is dropped in the ordinary way.
    pub(crate) fn into_inner(mut self) -> T {
        // only this and `drop` take it
        self.0.take().expect("it is there until it is taken")
    }
}

impl<T> Deref for Severed<T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.0.as_ref().expect("it is there until it is taken")
    }
}

impl<T> DerefMut for Severed<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("it is there until it is taken")
    }
}

impl<T> Drop for Severed<T> {
    fn drop(&mut self) {
        if let Some(inner) = self.0.take() {
            let _nowhere = NOWHERE.enter();
            drop(inner);
        }
    }
}

impl<T> Future for SeveredFuture<T> {
    type Output = T;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let done = (**self).as_mut().poll(cx);
        if done.is_ready() {
            self.0 = None; // it owns nothing any more
        }
        done
    }
}

/// A runtime that has ended: what is spawned on it is dropped at once, on the spot.
static NOWHERE: LazyLock<Handle> = LazyLock::new(|| {
    // without drivers there is nothing that could be missing
    let runtime = Builder::new_current_thread().build().expect("a runtime without drivers");
    let handle = runtime.handle().clone();
    runtime.shutdown_background();
    handle
});

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    struct SpawnsOnDrop(Arc<()>);
    impl Drop for SpawnsOnDrop {
        fn drop(&mut self) {
            let owned = self.0.clone();
            tokio::spawn(async move {
                std::future::pending::<()>().await;
                drop(owned);
            });
        }
    }

    #[tokio::test]
    async fn what_is_spawned_by_its_drop_is_dropped_on_the_spot() {
        let alive = Arc::new(());
        drop(Severed::new(SpawnsOnDrop(alive.clone())));
        assert_eq!(Arc::strong_count(&alive), 1);
        drop(Severed::new(SpawnsOnDrop(alive.clone())).into_inner());
        tokio::task::yield_now().await;
        assert_eq!(Arc::strong_count(&alive), 2, "an ordinary drop spawns where it is");
    }
}
