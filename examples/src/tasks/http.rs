//! What a pod answers to.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use leasehold::Result;
use std::time::Duration;
use tokio::net::TcpListener;

use super::{Pod, runs};

type Answer = (StatusCode, String);

pub(super) async fn serve(pod: Arc<Pod>, listener: TcpListener) {
    let routes = Router::new()
        .route("/deliveries/{id}/{repo}", post(deliver))
        .route("/access-token/{generation}", get(access_token))
        .route("/upgrades/{user}", post(issue))
        .route("/upgrades/{user}/{token}", post(redeem))
        .route("/chats/{user}", post(chat))
        .with_state(pod);
    if let Err(error) = axum::serve(listener, routes).await {
        tracing::error!(%error, "the server has ended");
    }
}

/// What cannot be decided now is for the sender to send again.
fn answer(outcome: Result<Answer>) -> Answer {
    outcome.unwrap_or_else(|error| (StatusCode::SERVICE_UNAVAILABLE, error.to_string()))
}

async fn deliver(State(pod): State<Arc<Pod>>, Path((id, repo)): Path<(String, String)>) -> Answer {
    let taken = runs::take_in(&pod, &id, &repo).await;
    answer(taken.map(|first| match first {
        true => (StatusCode::CREATED, "queued".to_owned()),
        false => (StatusCode::OK, "known".to_owned()),
    }))
}

async fn access_token(State(pod): State<Arc<Pod>>, Path(generation): Path<u64>) -> Answer {
    answer(pod.access_token(generation).await.map(|token| match token {
        Some(token) => (StatusCode::OK, token.to_string()),
        None => (StatusCode::SERVICE_UNAVAILABLE, "nobody got one in time".to_owned()),
    }))
}

async fn issue(State(pod): State<Arc<Pod>>, Path(user): Path<String>) -> Answer {
    let issued = async {
        let token = pod.upgrades(&user)?.issue(Duration::from_secs(30)).await?;
        Ok((StatusCode::CREATED, token.expose_secret().to_owned()))
    };
    answer(issued.await)
}

async fn redeem(
    State(pod): State<Arc<Pod>>,
    Path((user, token)): Path<(String, String)>,
) -> Answer {
    let redeemed = async { pod.upgrades(&user)?.redeem(&token).await };
    answer(redeemed.await.map(|redemption| match redemption.is_accepted() {
        true => (StatusCode::OK, "upgraded".to_owned()),
        false => (StatusCode::GONE, "not good".to_owned()),
    }))
}

async fn chat(State(pod): State<Arc<Pod>>, Path(user): Path<String>) -> Answer {
    answer(pod.chat(&user).await.map(|spoke| match spoke {
        true => (StatusCode::OK, "said".to_owned()),
        false => (StatusCode::CONFLICT, "somebody else speaks".to_owned()),
    }))
}
