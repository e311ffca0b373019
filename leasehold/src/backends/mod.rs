//! A backend by the scheme of its URL; a file each.

mod memory;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "sqlite")]
mod sqlite;

use std::sync::Arc;

use leasehold_core::{Backend, Error, ErrorKind, Result};

use crate::url::{StoreUrl, invalid};

/// The schemes, and the feature that each needs.
const SCHEMES: &[(&str, &str)] = &[
    ("memory", ""),
    ("sqlite", "sqlite"),
    ("postgres", "postgres"),
    ("postgresql", "postgres"),
    ("mysql", "mysql"),
    ("mariadb", "mysql"),
    ("redis", "redis"),
    ("rediss", "redis"),
    ("redis-cluster", "redis"),
    ("rediss-cluster", "redis"),
    ("redis-sentinel", "redis"),
    ("rediss-sentinel", "redis"),
    ("valkey", "redis"),
    ("valkeys", "redis"),
    ("valkey-cluster", "redis"),
    ("valkeys-cluster", "redis"),
    ("valkey-sentinel", "redis"),
    ("valkeys-sentinel", "redis"),
];

#[cfg_attr(
    not(any(feature = "postgres", feature = "mysql", feature = "redis", feature = "sqlite")),
    expect(clippy::unused_async, reason = "memory is there at once, the others are connected to")
)]
pub(crate) async fn open(url: &StoreUrl) -> Result<Arc<dyn Backend>> {
    let scheme = url.scheme.as_str();
    let Some((_, feature)) = SCHEMES.iter().find(|(known, _)| *known == scheme) else {
        let known: Vec<_> = SCHEMES.iter().map(|(scheme, _)| *scheme).collect();
        let known = known.join(", ");
        return Err(invalid(&format!("no store has the scheme {scheme}; known are {known}")));
    };
    match *feature {
        "" => memory::open(url),
        #[cfg(feature = "postgres")]
        "postgres" => postgres::open(url).await,
        #[cfg(feature = "mysql")]
        "mysql" => mysql::open(url).await,
        #[cfg(feature = "redis")]
        "redis" => redis::open(url).await,
        #[cfg(feature = "sqlite")]
        "sqlite" => sqlite::open(url).await,
        missing => {
            let detail = format!(
                "{scheme}: needs a feature of the crate: \
                 leasehold = {{ features = [\"{missing}\"] }}"
            );
            Err(Error::new(ErrorKind::Unsupported, detail))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connect;

    #[tokio::test]
    async fn a_url_that_is_none_says_what_would_be() {
        for (url, kind, said) in [
            ("nonsense", ErrorKind::InvalidOptions, "begins with a scheme"),
            ("oracle://db", ErrorKind::InvalidOptions, "known are memory, sqlite, postgres"),
            (
                "memory:?namespce=x",
                ErrorKind::InvalidOptions,
                "no option namespce; it has namespace",
            ),
        ] {
            let error = connect(url).await.unwrap_err();
            assert_eq!(error.kind(), kind, "{url}");
            assert!(error.to_string().contains(said), "{url}: {error}");
        }
    }

    #[cfg(not(feature = "postgres"))]
    #[tokio::test]
    async fn a_missing_feature_is_named() {
        let error = connect("postgres://me:s3cret@db/app").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let text = format!("{error} {error:?}");
        assert!(text.contains("features = [\"postgres\"]"), "{text}");
        assert!(!text.contains("s3cret"), "{text}");
    }

    #[tokio::test]
    async fn memory_is_shared_by_name() {
        use leasehold_core::{Key, LeaseOptions};
        let key = Key::new("x").unwrap();
        let (one, two) =
            (connect("memory:shared").await.unwrap(), connect("memory:shared").await.unwrap());
        let (other, own) = (
            connect("memory:shared?namespace=other").await.unwrap(),
            connect("memory:").await.unwrap(),
        );
        let _held = one.lease(&key, LeaseOptions::try_once()).await.unwrap().expect("free");
        assert!(two.lease(&key, LeaseOptions::try_once()).await.unwrap().is_none());
        assert!(other.lease(&key, LeaseOptions::try_once()).await.unwrap().is_some());
        assert!(own.lease(&key, LeaseOptions::try_once()).await.unwrap().is_some());
    }

    /// Port 1 of this machine: nobody listens there.
    #[cfg(all(feature = "postgres", feature = "mysql", feature = "redis"))]
    #[tokio::test]
    async fn no_error_shows_a_password() {
        for url in [
            "postgres://me:s3cret@127.0.0.1:1/app?sslmode=disable",
            "postgres://me:s3cret@127.0.0.1:port/app",
            "postgres://me:s3cret@127.0.0.1:1/app?lock_table_share=much",
            "mysql://me:s3cret@127.0.0.1:1/app",
            "mysql://me:s3cret@127.0.0.1:port/app",
            "mysql://me:s3cret@127.0.0.1:1/app?pool_max=many",
            "redis://me:s3cret@127.0.0.1:1/0?command_limit=300ms",
            "redis://me:s3cret@127.0.0.1:port/0",
            "redis://me:s3cret@127.0.0.1:1/0?lock_ttl=long",
        ] {
            let error = connect(url).await.unwrap_err();
            let mut text = format!("{error} {error:?}");
            let mut source = std::error::Error::source(&error);
            while let Some(cause) = source {
                text = format!("{text} {cause} {cause:?}");
                source = cause.source();
            }
            assert!(!text.contains("s3cret"), "{url}: {text}");
        }
    }

    #[cfg(all(feature = "postgres", feature = "mysql", feature = "redis", feature = "sqlite"))]
    #[test]
    fn every_option_is_documented() {
        let page = include_str!("../../README.md");
        for option in [postgres::OURS, mysql::OURS, redis::OURS, sqlite::OURS].concat() {
            assert!(page.contains(&format!("`{option}`")), "{option} is not in the README");
        }
    }
}
