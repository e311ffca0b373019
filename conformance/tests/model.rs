//! The memory backend against the sequential model, under a paused clock.

use leasehold_conformance::{MemoryHarness, model};
use proptest::test_runner::{Config, TestCaseError, TestRunner};

#[test]
fn memory_answers_as_the_model() {
    let config = Config {
        cases: 2000,
        max_shrink_iters: 4000,
        failure_persistence: None,
        ..Config::default()
    };
    let mut runner = TestRunner::new(config);
    let sequences = model::operations(40);
    let result = runner.run(&sequences, |operations| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .map_err(|error| TestCaseError::fail(error.to_string()))?;
        runtime
            .block_on(model::run(&MemoryHarness::new(), &operations))
            .map_err(|fault| TestCaseError::fail(fault.message().to_owned()))
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}
