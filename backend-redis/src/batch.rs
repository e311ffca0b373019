//! What is asked for while an exchange is under way goes out together in the next.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold_core::{Error, ErrorKind, Result};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::conn::Conn;

/// Exchanges under way at a time: one is answered while the next one is on its way.
const UNDER_WAY: usize = 2;
/// Requests of one exchange: it takes the server a fraction of a millisecond, in which it serves
/// nobody else.
const MOST: usize = 64;

/// A request that can go out together with others of its kind.
pub(crate) trait Request: Debug + Send + Sync + Sized + 'static {
    type Answer: Debug + Send + 'static;

    /// Where a handle queues them.
    fn queue(conn: &Conn) -> &Queue<Self>;

    /// One exchange; the answers are in the order of the requests.
    fn exchange(
        conn: &Conn,
        requests: &[Self],
    ) -> impl Future<Output = Result<Vec<Self::Answer>>> + Send;
}

/// Requests that wait for their exchange.
#[derive(Debug)]
pub(crate) struct Queue<R: Request>(Mutex<State<R>>);

type Waiting<R> = (R, oneshot::Sender<Result<<R as Request>::Answer>>);

#[derive(Debug)]
struct State<R: Request> {
    under_way: usize,
    waiting: VecDeque<Waiting<R>>,
}

impl<R: Request> Default for Queue<R> {
    fn default() -> Self {
        Self(Mutex::new(State { under_way: 0, waiting: VecDeque::new() }))
    }
}

impl<R: Request> Queue<R> {
    fn lock(&self) -> MutexGuard<'_, State<R>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks: at once if not much is under way, otherwise together with others.
pub(crate) async fn ask<R: Request>(conn: &Arc<Conn>, request: R) -> Result<R::Answer> {
    let entered = {
        let mut state = R::queue(conn).lock();
        if state.under_way < UNDER_WAY {
            state.under_way += 1;
            Ok(request)
        } else {
            let (tell, answer) = oneshot::channel();
            state.waiting.push_back((request, tell));
            Err(answer)
        }
    };
    match entered {
        Ok(request) => {
            let _turn = Turn::<R>::of(conn);
            let answers = R::exchange(conn, std::slice::from_ref(&request)).await?;
            answers.into_iter().next().ok_or_else(too_few)
        }
        Err(answer) => answer.await.unwrap_or_else(|_| Err(ended())),
    }
}

/// One of the exchanges under way. Dropping it begins the next.
struct Turn<R: Request>(Arc<Conn>, PhantomData<R>);

impl<R: Request> Turn<R> {
    fn of(conn: &Arc<Conn>) -> Self {
        Self(conn.clone(), PhantomData)
    }
}

impl<R: Request> Drop for Turn<R> {
    fn drop(&mut self) {
        let batch: Vec<Waiting<R>> = {
            let mut state = R::queue(&self.0).lock();
            if state.waiting.is_empty() {
                state.under_way -= 1;
                return;
            }
            let count = state.waiting.len().min(MOST);
            state.waiting.drain(..count).collect()
        };
        // where the runtime has ended the batch is dropped with its turn, and so on
        let turn = Self::of(&self.0);
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(serve(turn, batch));
        }
    }
}

async fn serve<R: Request>(turn: Turn<R>, batch: Vec<Waiting<R>>) {
    let (requests, waiting): (Vec<R>, Vec<_>) = batch.into_iter().unzip();
    let answers = R::exchange(&turn.0, &requests).await;
    drop(turn);
    match answers {
        Ok(answers) => {
            // whom no answer is left for hears that the exchange has ended
            for (tell, answer) in waiting.into_iter().zip(answers) {
                drop(tell.send(Ok(answer))); // nobody waits for it any more
            }
        }
        Err(error) => {
            for tell in waiting {
                drop(tell.send(Err(error.clone()))); // nobody waits for it any more
            }
        }
    }
}

fn too_few() -> Error {
    Error::new(ErrorKind::Backend, "the server gave no answer to a request")
}

fn ended() -> Error {
    Error::new(ErrorKind::Unavailable, "the exchange ended without an answer")
}
