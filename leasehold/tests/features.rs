//! Who asks for one store gets the driver of no other.

use std::process::Command;

/// The crates that make up the library with these features, as a user's build has them.
fn crates(features: &str) -> String {
    let tree = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "--locked", "--edges", "normal", "--prefix", "none"])
        .args(["--package", "leasehold", "--no-default-features", "--features", features])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    String::from_utf8(tree.stdout).expect("names of crates are text")
}

#[test]
fn each_store_has_its_own_driver_only() {
    let drivers = [
        ("postgres", "sqlx-postgres v"),
        ("mysql", "mysql_async v"),
        ("redis", "fred v"),
        ("sqlite", "sqlx-sqlite v"),
    ];
    let none = crates("");
    for (feature, driver) in drivers {
        assert!(!none.contains(driver), "without features there is {driver}:\n{none}");
        let tree = crates(feature);
        for (other, theirs) in drivers {
            assert_eq!(
                tree.contains(theirs),
                other == feature,
                "{theirs} with the feature {feature}:\n{tree}"
            );
        }
        let backend = format!("leasehold-{feature} v");
        assert!(tree.contains(&backend), "{backend} with the feature {feature}:\n{tree}");
    }
}
