//! `leasehold bench`.

use std::fmt::Write;
use std::future::Future;
use std::time::{Duration, Instant};

use clap::Args;
use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use leasehold::{
    ClaimOptions, DedupeOptions, Error, ErrorKind, Key, Keys, Kind, LeaseOptions, LockOptions,
    Result, Store,
};
use serde_json::{Value, json};

use super::holding::KindArg;
use crate::cli::Globals;
use crate::failure::{Failure, Outcome};
use crate::table::{Cell, Table};
use crate::ui::Ui;
use crate::{duration, exit, store, style};

/// The longest time that is told apart, in microseconds.
const LONGEST: u64 = 60_000_000;
/// How wide the longest bar is.
const BAR: u64 = 40;

/// Measures the store from here: how long it takes to take and free, and how often per second
///
/// First one task after the other, then many at once, each with a name of its own (nobody waits for
/// anybody), in a namespace of its own. One take and free counts as one.
#[derive(Debug, Args)]
pub(crate) struct Bench {
    /// The time of each measurement
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration::parse)]
    time: Duration,

    /// Tasks at once in the second measurement of each kind
    #[arg(long, value_name = "COUNT", default_value = "32")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1024))]
    tasks: u16,

    /// Only of this kind; may be repeated
    #[arg(long, short, value_name = "KIND")]
    kind: Vec<KindArg>,
}

/// What was measured.
#[derive(Debug)]
struct Measured {
    kind: Kind,
    tasks: u16,
    took: Duration,
    /// In microseconds.
    times: Histogram<u64>,
}

impl Measured {
    fn per_second(&self) -> f64 {
        self.times.len() as f64 / self.took.as_secs_f64()
    }

    fn at(&self, quantile: f64) -> Duration {
        Duration::from_micros(self.times.value_at_quantile(quantile))
    }
}

pub(crate) async fn bench(ui: Ui, globals: &Globals, args: &Bench) -> Outcome {
    let url = store::url(globals, Some("leasehold-bench"))?;
    let namespace = format!("leasehold-bench-{:016x}", rand::random::<u64>());
    let store = leasehold::connect(&store::with_option(&url, "namespace", &namespace)).await?;
    store.migrate().await?;
    let kinds: Vec<Kind> = match args.kind.is_empty() {
        true => Kind::ALL.to_vec(),
        false => args.kind.iter().map(|kind| Kind::from(*kind)).collect(),
    };
    let bar = progress(ui, kinds.len() * 2);
    let mut all = Vec::new();
    for kind in kinds {
        for tasks in [1, args.tasks] {
            bar.set_message(format!("{kind}, {tasks} at once"));
            all.push(measured(&store, kind, tasks, args.time).await?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    store::close(&store).await;
    report(ui, &store, &all);
    Ok(exit::OK)
}

fn progress(ui: Ui, steps: usize) -> ProgressBar {
    let target = match ui.shows_progress() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(steps as u64), target);
    if let Ok(style) = ProgressStyle::with_template("{bar:30.cyan/dim} {pos}/{len} {msg}") {
        bar.set_style(style);
    }
    bar
}

/// Takes and frees for so long, so many at once.
async fn measured(
    store: &Store,
    kind: Kind,
    tasks: u16,
    time: Duration,
) -> Result<Measured, Failure> {
    once(store, kind, &Key::new("warm-up")?).await?;
    let start = Instant::now();
    let task = |number: u16| {
        let store = store.clone();
        async move {
            let mut times = histogram();
            while start.elapsed() < time {
                let key = Key::new(format!("{number}"))?;
                let began = Instant::now();
                once(&store, kind, &key).await?;
                times.saturating_record(began.elapsed().as_micros() as u64);
            }
            Ok::<_, Error>(times)
        }
    };
    let mut times = histogram();
    for ended in all(tasks, task).await? {
        // of one layout: they always add up
        times.add(ended?).map_err(|error| Failure::usage(error.to_string(), ""))?;
    }
    Ok(Measured { kind, tasks, took: start.elapsed(), times })
}

/// What all tasks give.
async fn all<T, F>(tasks: u16, task: impl Fn(u16) -> F) -> Result<Vec<T>, Failure>
where
    T: Send + 'static,
    F: Future<Output = T> + Send + 'static,
{
    let running: Vec<_> = (0..tasks).map(|number| tokio::spawn(task(number))).collect();
    let mut given = Vec::with_capacity(running.len());
    for task in running {
        given.push(task.await.map_err(|error| Failure::system("a task", &error.into()))?);
    }
    Ok(given)
}

/// Takes one and frees it.
async fn once(store: &Store, kind: Kind, key: &Key) -> Result<()> {
    let busy = || {
        let detail = "somebody else holds a name of this bench's own namespace";
        Error::new(ErrorKind::Backend, detail).on(key)
    };
    match kind {
        Kind::Lock => {
            let guard = store.lock(key, LockOptions::default()).await?;
            guard.ok_or_else(busy)?.release().await
        }
        Kind::Lease => {
            let guard = store.lease(key, LeaseOptions::default()).await?;
            guard.ok_or_else(busy)?.release().await
        }
        Kind::Claim => {
            let claim = store.claim(&Keys::from(key.clone()), ClaimOptions::default()).await?;
            claim.ok_or_else(busy)?.commit().await
        }
        Kind::Dedupe => {
            let admission = store.admit(key, DedupeOptions::default()).await?;
            admission.first().ok_or_else(busy)?.abandon().await
        }
    }
}

fn histogram() -> Histogram<u64> {
    // the bounds are in order, which is all that it asks for
    Histogram::new_with_bounds(1, LONGEST, 3).unwrap_or_else(|_| unreachable!("fixed bounds"))
}

fn report(ui: Ui, store: &Store, all: &[Measured]) {
    if ui.is_json() {
        let rows: Vec<Value> = all.iter().map(to_json).collect();
        return ui.print_json(&json!({"backend": store.name(), "measurements": rows}));
    }
    let mut table =
        Table::new(&["KIND", "AT ONCE", "PER SECOND", "MEDIAN", "90 %", "99 %", "LONGEST"]);
    for measured in all {
        table.row(vec![
            Cell::styled(measured.kind.as_str(), style::NAME),
            measured.tasks.to_string().into(),
            format!("{:.0}", measured.per_second()).into(),
            told(measured.at(0.5)).into(),
            told(measured.at(0.9)).into(),
            told(measured.at(0.99)).into(),
            told(measured.at(1.0)).into(),
        ]);
    }
    ui.print_table(&table);
    if ui.is_terminal() {
        for measured in all {
            ui.print(&bars(measured));
        }
    }
}

fn told(time: Duration) -> String {
    match time.as_micros() {
        micros @ ..1000 => format!("{micros} µs"),
        micros @ 1000..1_000_000 => format!("{:.1} ms", micros as f64 / 1e3),
        micros => format!("{:.1} s", micros as f64 / 1e6),
    }
}

/// A histogram of bars; each is of times twice as long as the one before.
fn bars(measured: &Measured) -> String {
    let (name, dim) = (style::NAME, style::DIM);
    let mut text = format!("\n{name}{}{name:#}, {} at once\n", measured.kind, measured.tasks);
    let first = measured.times.min().max(1).ilog2();
    let last = measured.times.max().max(1).ilog2();
    let counts: Vec<(u32, u64)> = (first..=last)
        .map(|power| (power, measured.times.count_between(1 << power, (2 << power) - 1)))
        .collect();
    let most = counts.iter().map(|(_, count)| *count).max().unwrap_or(0).max(1);
    for (power, count) in counts {
        let up_to = told(Duration::from_micros(2 << power));
        let mut width = (count * BAR / most) as usize;
        if count > 0 {
            width = width.max(1);
        }
        let bar = "▇".repeat(width);
        let _ = writeln!(text, "  {dim}< {up_to:>8}{dim:#} {bar} {count}");
    }
    text
}

fn to_json(measured: &Measured) -> Value {
    let micros = |quantile| measured.times.value_at_quantile(quantile);
    json!({
        "kind": measured.kind.as_str(), "at_once": measured.tasks,
        "count": measured.times.len(), "per_second": measured.per_second(),
        "p50_us": micros(0.5), "p90_us": micros(0.9), "p99_us": micros(0.99),
        "max_us": micros(1.0),
    })
}
