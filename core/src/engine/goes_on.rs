//! [`GoesOn`]: work that the caller's cancellation does not cut short.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::runtime::Handle;

use crate::steer::steered;

/// Work that goes on in a task of its own if it is dropped after it was first polled.
///
/// Most callers wait to the end; they are spared the task.
pub(super) struct GoesOn<T: Send + 'static> {
    work: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
    runtime: Handle,
    begun: bool,
}

impl<T: Send + 'static> GoesOn<T> {
    /// The work is done, and goes on, on the caller's runtime, or on `fallback` outside of any.
    pub(super) fn new(work: impl Future<Output = T> + Send + 'static, fallback: &Handle) -> Self {
        let runtime = Handle::try_current().unwrap_or_else(|_| fallback.clone());
        Self { work: Some(Box::pin(work)), runtime, begun: false }
    }
}

impl<T: Send + 'static> Future for GoesOn<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let this = self.get_mut();
        this.begun = true;
        let _context = this.runtime.enter();
        let Some(work) = &mut this.work else {
            return Poll::Pending; // it has ended: as a fused future
        };
        let polled = work.as_mut().poll(context);
        if polled.is_ready() {
            this.work = None;
        }
        polled
    }
}

impl<T: Send + 'static> Drop for GoesOn<T> {
    fn drop(&mut self) {
        // where the work panicked there is nothing to go on with
        if let Some(work) = self.work.take()
            && self.begun
            && !std::thread::panicking()
        {
            self.runtime.spawn(steered(work));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    fn counting(count: &Arc<AtomicU32>) -> GoesOn<u32> {
        let count = count.clone();
        let work = async move {
            count.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_secs(1)).await;
            count.fetch_add(1, Ordering::SeqCst) + 1
        };
        GoesOn::new(work, &Handle::current())
    }

    #[tokio::test(start_paused = true)]
    async fn it_goes_on_only_once_it_has_begun() {
        let count = Arc::new(AtomicU32::new(0));
        drop(counting(&count));
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(count.load(Ordering::SeqCst), 0);
        let mut begun = counting(&count);
        let polled =
            std::future::poll_fn(|context| Poll::Ready(Pin::new(&mut begun).poll(context)));
        assert!(polled.await.is_pending());
        drop(begun);
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(count.load(Ordering::SeqCst), 2);
        assert_eq!(counting(&count).await, 4);
    }
}
