//! The explorer: runs a scenario again and again, each time under another schedule.
//!
//! Depth first over the choice points, without keeping states: a run repeats the choices of its
//! prefix and goes on without delays or faults. The bound is on *delays* (Emmi, Qadeer, Rakamarić,
//! *Delay-Bounded Scheduling*, POPL 2011: the schedule is first come, first served, except that a
//! bounded number of times what is first is put off) and on faults.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tokio::time::Instant;

use super::world::World;

/// Virtual time in which a scenario must be over, and afterwards all that it has left behind.
const PATIENCE: Duration = Duration::from_secs(120);
/// A run with more steps goes round in circles.
const MAX_STEPS: usize = 5_000;

/// How far schedules are explored.
#[derive(Clone, Copy, Debug)]
struct Bound {
    delays: u32,
    faults: u32,
}

/// What is run under each schedule.
pub(super) type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A schedule under which a property does not hold.
#[derive(Debug)]
struct Counterexample {
    violation: String,
    /// The option that was taken at each step, as [`replay`] takes it.
    schedule: String,
    story: Vec<String>,
}

impl std::fmt::Display for Counterexample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{}", self.violation)?;
        for (step, what) in self.story.iter().enumerate() {
            writeln!(f, "  {step:3}  {what}")?;
        }
        write!(f, "  schedule: {}", self.schedule)
    }
}

#[derive(Debug)]
struct Explored {
    schedules: u64,
    steps: u64,
    counterexample: Option<Counterexample>,
}

struct Point {
    taken: usize,
    options: usize,
    label: u64,
}

struct Run {
    points: Vec<Point>,
    violation: Option<String>,
    story: Vec<String>,
}

/// Explores all schedules up to the bound, or until one violates a property.
fn explore(scenario: impl Fn(World) -> Task, bound: Bound) -> Explored {
    let mut prefix: Vec<usize> = Vec::new();
    let mut last: Vec<Point> = Vec::new();
    let mut explored = Explored { schedules: 0, steps: 0, counterexample: None };
    loop {
        let run = run(&scenario, bound, &prefix, false);
        explored.schedules += 1;
        explored.steps += run.points.len() as u64;
        // what is not the same each time would be explored only by chance
        let same = prefix.len().saturating_sub(1);
        for (old, new) in last.iter().zip(&run.points).take(same) {
            assert!(
                old.label == new.label && old.options == new.options,
                "the scenario is not deterministic: {}",
                schedule(&run.points)
            );
        }
        if run.violation.is_some() {
            let taken: Vec<usize> = run.points.iter().map(|point| point.taken).collect();
            explored.counterexample = replay_taken(&scenario, bound, &taken);
            assert!(explored.counterexample.is_some(), "a violation that a replay does not find");
            return explored;
        }
        last = run.points;
        let Some(deepest) = last.iter().rposition(|point| point.taken + 1 < point.options) else {
            return explored;
        };
        prefix = last[..=deepest].iter().map(|point| point.taken).collect();
        prefix[deepest] += 1;
    }
}

/// Explores a scenario up to each of some bounds (delays, faults), and panics with the schedule
/// under which a property does not hold. `LEASEHOLD_MODEL_DELAYS` adds to the delays,
/// `LEASEHOLD_MODEL_FAULTS` to the faults; `LEASEHOLD_MODEL_REPLAY` is a schedule to run instead.
pub(super) fn holds(
    name: &str,
    scenario: impl Fn(World) -> Task,
    bounds: &[(u32, u32)],
    at_least: u64,
) {
    if let Ok(schedule) = std::env::var("LEASEHOLD_MODEL_REPLAY") {
        match replay(&scenario, &schedule) {
            Some(found) => panic!("{name}: {found}"),
            None => return println!("model of {name}: nothing is wrong with {schedule}"),
        }
    }
    let (delays, faults) = (extra("LEASEHOLD_MODEL_DELAYS"), extra("LEASEHOLD_MODEL_FAULTS"));
    let mut schedules = 0;
    for bound in bounds {
        let bound = Bound { delays: bound.0 + delays, faults: bound.1 + faults };
        let start = std::time::Instant::now();
        let explored = explore(&scenario, bound);
        schedules += explored.schedules;
        println!(
            "model of {name}: {} schedules of {} steps, all with up to {} delays and {} faults, in {:.1?}",
            explored.schedules,
            explored.steps / explored.schedules,
            bound.delays,
            bound.faults,
            start.elapsed()
        );
        if let Some(found) = explored.counterexample {
            panic!("{name}: {found}");
        }
    }
    assert!(schedules >= at_least, "{name}: only {schedules} schedules, not {at_least}");
}

fn extra(variable: &str) -> u32 {
    std::env::var(variable).map_or(0, |more| more.parse().expect("a number"))
}

/// Finds the fault that was planted, with the simplest schedule that shows it, which can be
/// replayed.
pub(super) fn finds(name: &str, scenario: impl Fn(World) -> Task) {
    let mut schedules = 0;
    for (delays, faults) in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)] {
        let explored = explore(&scenario, Bound { delays, faults });
        schedules += explored.schedules;
        if let Some(found) = explored.counterexample {
            println!("planted: {name}: found by schedule {schedules}: {found}");
            let again = replay(&scenario, &found.schedule).map(|found| found.violation);
            assert_eq!(again, Some(found.violation), "the replay of {name} differs");
            return;
        }
    }
    panic!("planted, and not found in {schedules} schedules: {name}");
}

/// Runs one schedule, as a [`Counterexample`] prints it.
fn replay(scenario: impl Fn(World) -> Task, schedule: &str) -> Option<Counterexample> {
    let (bound, taken) = schedule.split_once(':').expect("a schedule begins with its bound");
    let (delays, faults) = bound.split_once('+').expect("a bound is delays+faults");
    let number = |text: &str| text.parse().expect("a number");
    let bound = Bound { delays: number(delays), faults: number(faults) };
    let taken: Vec<usize> = taken
        .split('.')
        .filter(|text| !text.is_empty())
        .map(|text| number(text) as usize)
        .collect();
    replay_taken(&scenario, bound, &taken)
}

fn replay_taken(
    scenario: &impl Fn(World) -> Task,
    bound: Bound,
    taken: &[usize],
) -> Option<Counterexample> {
    let run = run(scenario, bound, taken, true);
    let schedule = format!("{}+{}:{}", bound.delays, bound.faults, schedule(&run.points));
    run.violation.map(|violation| Counterexample { violation, schedule, story: run.story })
}

/// The choices, without those at the end that are not any.
fn schedule(points: &[Point]) -> String {
    let length = points.iter().rposition(|point| point.taken > 0).map_or(0, |last| last + 1);
    let taken: Vec<_> = points[..length].iter().map(|point| point.taken.to_string()).collect();
    taken.join(".")
}

fn run(scenario: &impl Fn(World) -> Task, bound: Bound, prefix: &[usize], tell: bool) -> Run {
    let world = World::new();
    world.enter();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    let scenario = scenario(world.clone());
    let run = runtime.block_on(drive(&world, scenario, bound, prefix, tell));
    World::leave();
    run
}

async fn drive(world: &World, scenario: Task, bound: Bound, prefix: &[usize], tell: bool) -> Run {
    let mut run = Run { points: Vec::new(), violation: None, story: Vec::new() };
    let start = Instant::now();
    let root = world.spawn("the scenario", scenario);
    let (mut delays, mut faults) = (bound.delays, bound.faults);
    let mut deadline = start + PATIENCE;
    let mut ended = false;
    loop {
        // what was aborted is dropped now
        tokio::task::yield_now().await;
        run.violation = world.violation();
        if run.violation.is_some() {
            return run;
        }
        if root.is_finished() && !ended {
            ended = true;
            deadline = Instant::now() + PATIENCE;
        }
        if !world.is_ready() {
            if ended && world.tasks().is_empty() {
                run.violation = world.violation_at_end();
                return run;
            }
            if !world.idle(deadline).await {
                let what = if ended { "left behind" } else { "nothing goes on any more" };
                run.violation = Some(format!("{what}: {}", world.tasks().join(", ")));
                return run;
            }
            continue;
        }
        if run.points.len() >= MAX_STEPS || Instant::now() >= deadline {
            let what = if ended { "left behind" } else { "it does not come to an end" };
            run.violation = Some(format!("{what}: {}", world.tasks().join(", ")));
            return run;
        }
        let options = world.options(delays, faults);
        let taken = prefix.get(run.points.len()).copied().unwrap_or(0);
        let option = options.get(taken).expect("a schedule of another scenario or version");
        let label = world.describe(option);
        run.points.push(Point { taken, options: options.len(), label: digest(&label) });
        if tell {
            run.story.push(format!("{:>8.3} s  {label}", start.elapsed().as_secs_f64()));
        }
        delays -= option.delays;
        faults -= option.faults;
        world.step(option).await;
    }
}

/// To see that two runs do the same (FNV-1a).
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
