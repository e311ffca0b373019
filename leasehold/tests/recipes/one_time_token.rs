use std::future::Future;
use std::task::{Context, Waker};

use leasehold::recipes::{OneTimeTokens, Redemption};
use leasehold::{DedupeOptions, ErrorKind};
use tokio::task::JoinSet;

use crate::{key, processes, secs, settle};

#[tokio::test(start_paused = true)]
async fn a_token_is_accepted_once() {
    let [a, b] = processes();
    let issuer = OneTimeTokens::new(a.clone(), key("upgrade"));
    for _ in 0..10 {
        let token = issuer.issue(secs(30)).await.unwrap();
        let mut tasks = JoinSet::new();
        for task in 0..20 {
            let store = if task % 2 == 0 { a.clone() } else { b.clone() };
            let (tokens, token) = (OneTimeTokens::new(store, key("upgrade")), token.clone());
            tasks.spawn(async move { tokens.redeem(token.expose_secret()).await.unwrap() });
        }
        let answers = tasks.join_all().await;
        let accepted = answers.iter().filter(|answer| answer.is_accepted()).count();
        assert_eq!(accepted, 1, "{answers:?}");
        let again = issuer.redeem(token.expose_secret()).await.unwrap();
        assert_eq!(again, Redemption::Used);
    }
}

#[tokio::test(start_paused = true)]
async fn a_token_is_good_for_its_ttl_and_never_again() {
    let [a] = processes();
    let tokens = OneTimeTokens::new(a, key("upgrade"));
    let [late, used] =
        [tokens.issue(secs(30)).await.unwrap(), tokens.issue(secs(30)).await.unwrap()];
    tokio::time::sleep(secs(29)).await;
    assert!(tokens.redeem(used.expose_secret()).await.unwrap().is_accepted());
    for _ in 0..100 {
        tokio::time::sleep(secs(1)).await;
        let [late, used] = [&late, &used].map(|token| tokens.redeem(token.expose_secret()));
        assert_eq!(late.await.unwrap(), Redemption::Unknown);
        assert!(!used.await.unwrap().is_accepted());
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_never_issued_stays_unknown() {
    let [a, b] = processes();
    let (ours, others) =
        (OneTimeTokens::new(a.clone(), key("upgrade")), OneTimeTokens::new(b, key("reset")));
    let made_up = format!("{}.{:x}", "0".repeat(64), 30_000);
    let elsewhere = others.issue(secs(30)).await.unwrap();
    let mine = ours.issue(secs(30)).await.unwrap();
    let (secret, _) = mine.expose_secret().split_once('.').unwrap();
    let longer = format!("{secret}.{:x}", 3_600_000);
    for presented in [&made_up, elsewhere.expose_secret(), &longer] {
        for _ in 0..5 {
            assert_eq!(ours.redeem(presented).await.unwrap(), Redemption::Unknown, "{presented}");
            settle().await;
        }
    }
    for garbage in
        ["", ".", "x", "é", &"0".repeat(64), &"9".repeat(100_000), &longer.to_uppercase()]
    {
        assert_eq!(ours.redeem(garbage).await.unwrap(), Redemption::Unknown);
    }
    // looked up many times at once, none is taken for the other's trace
    for _ in 0..20 {
        let (one, two) = tokio::join!(ours.redeem(&made_up), ours.redeem(&made_up));
        assert!(!one.unwrap().is_accepted() && !two.unwrap().is_accepted());
    }
    assert!(others.redeem(elsewhere.expose_secret()).await.unwrap().is_accepted());
    assert!(ours.redeem(mine.expose_secret()).await.unwrap().is_accepted());
}

#[tokio::test(start_paused = true)]
async fn a_redemption_that_was_cut_off_can_be_tried_again() {
    let [a] = processes();
    let tokens = OneTimeTokens::new(a.clone(), key("upgrade"));
    for polls in 0..8 {
        let token = tokens.issue(secs(60)).await.unwrap();
        let mut redeeming = Box::pin(tokens.redeem(token.expose_secret()));
        for _ in 0..polls {
            if redeeming.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop(redeeming);
        tokio::time::sleep(secs(15)).await;
        // consumed by the one that was cut off, or by this one, and then no more
        let answer = tokens.redeem(token.expose_secret()).await.unwrap();
        assert_ne!(answer, Redemption::Unknown, "after {polls} polls");
        let again = tokens.redeem(token.expose_secret()).await.unwrap();
        assert_eq!(again, Redemption::Used, "after {polls} polls");
    }
}

#[tokio::test(start_paused = true)]
async fn the_secret_is_neither_shown_nor_stored() {
    let [a] = processes();
    let tokens = OneTimeTokens::new(a.clone(), key("upgrade"));
    let token = tokens.issue(secs(30)).await.unwrap();
    let (secret, _) = token.expose_secret().split_once('.').unwrap();
    assert_eq!(secret.len(), 64);
    assert_eq!(format!("{token:?}"), "OneTimeToken(..)");
    tokens.redeem(token.expose_secret()).await.unwrap();
    for shown in [format!("{tokens:?}"), format!("{:?}", a.store())] {
        assert!(!shown.contains(secret), "{shown}");
    }
    let other = tokens.issue(secs(30)).await.unwrap();
    assert_ne!(token, other);
    let refused = tokens.issue(secs(0)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidOptions);
    assert!(DedupeOptions::default().check().is_ok());
}
