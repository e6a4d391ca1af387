//! The contents of the panels: which bars they have, and how long these are.

use super::{
    group::{grouped, median_of},
    rows::{Case, Kernel, Optimizer, Rows, Step, Transfer},
    text,
    tint::Tint,
    torch::{Comparison, Subject, comparisons},
};

/// Rows of bars, in one or several columns.
#[derive(Debug, Default)]
pub(super) struct Panel {
    pub(super) title: String,
    pub(super) subtitle: String,
    /// The meaning of the marks on bars, if there are any.
    pub(super) mark: Option<&'static str>,
    pub(super) columns: Vec<Column>,
    /// All columns have the same scale.
    pub(super) has_common_scale: bool,
    pub(super) rows: Vec<Row>,
}

/// A column of bars.
#[derive(Debug)]
pub(super) struct Column {
    pub(super) title: &'static str,
    /// The name of the line at 1.
    pub(super) reference: Option<&'static str>,
    /// The share of the width.
    pub(super) width: i32,
}

/// The bars of a subject, one for each column.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) detail: String,
    pub(super) tint: Tint,
    pub(super) bars: Vec<Option<Bar>>,
}

/// A bar, with the text at its end.
#[derive(Debug)]
pub(super) struct Bar {
    pub(super) length: f64,
    pub(super) mark: Option<f64>,
    pub(super) text: String,
    /// A second text, less prominent.
    pub(super) note: String,
}

impl Bar {
    fn new(length: f64) -> Self {
        Self { length, mark: None, text: text::decimal(length), note: String::new() }
    }
}

/// Returns the panels, and notes about rows that they do not show.
pub(super) fn all(rows: &Rows) -> (Vec<Panel>, Vec<String>) {
    let mut panels: Vec<_> = comparisons(&rows.torch).iter().map(torch).collect();
    panels.extend(transfers(&rows.transfers));
    let (steps, note) = steps(&rows.steps);
    panels.extend(steps);
    let mut notes = Vec::from_iter(note);
    panels.extend(optimizers(&rows.optimizers, &mut notes));
    panels.extend(kernels(&rows.kernels));
    (panels, notes)
}

/// Step times and memory. Bars are relative to DDP if it was measured.
fn torch(of: &Comparison) -> Panel {
    let is_relative = of.subjects.iter().all(|subject| subject.x_ddp.is_some());
    let step = |subject: &Subject| {
        let seconds = format!("{} s", text::decimal(subject.seconds));
        let (length, texts) = match subject.x_ddp {
            Some(ratio) if is_relative => (ratio, (text::decimal(ratio), seconds)),
            _ => (subject.seconds, (seconds, String::new())),
        };
        let mark = subject.x_floor.map(|ratio| length / ratio);
        Some(Bar { length, mark, text: texts.0, note: texts.1 })
    };
    let mib = |peak: Option<f64>| {
        peak.map(|mib| Bar { text: text::thousands(mib as u64), ..Bar::new(mib) })
    };
    let has_gpu = of.subjects.iter().any(|subject| subject.gpu_peak_mib.is_some());
    let row = |subject: &Subject| {
        let mut bars = vec![step(subject), mib(subject.peak_mib)];
        bars.extend(has_gpu.then(|| mib(subject.gpu_peak_mib)));
        Row { name: subject.name(), detail: subject.detail.clone(), tint: subject.tint, bars }
    };
    let (title, reference) =
        if is_relative { ("Step time, x DDP", Some("DDP")) } else { ("Step time", None) };
    let mut columns = vec![
        Column { title, reference, width: 3 },
        Column { title: "Rank memory, MiB", reference: None, width: 2 },
    ];
    columns.extend(has_gpu.then_some(Column {
        title: "GPU memory, MiB",
        reference: None,
        width: 2,
    }));
    let has_floor = of.subjects.iter().any(|subject| subject.x_floor.is_some());
    Panel {
        title: "A training step in PyTorch: time and peak memory".to_owned(),
        subtitle: of.description(),
        mark: has_floor.then_some(
            "the floor: a step without synchronisation, and its bytes at the speed of this machine",
        ),
        columns,
        rows: of.subjects.iter().map(row).collect(),
        ..Panel::default()
    }
}

/// Pull and push as a fraction of a raw TCP stream, by size.
fn transfers(rows: &[Transfer]) -> Option<Panel> {
    let mut rows: Vec<_> = rows.iter().collect();
    rows.sort_by_key(|row| (row.bytes, row.transport != "shm"));
    let key = |row: &Transfer| {
        let detail = [
            Some(text::transport(&row.transport).to_owned()),
            row.raw_tls_gbps.map(|_| "TLS".to_owned()),
            (row.connections != 1).then(|| text::count(row.connections, "connection")),
        ];
        (row.bytes, text::joined(&detail), row.transport.clone())
    };
    let row = |((bytes, detail, transport), rows): ((u64, String, String), Vec<&Transfer>)| {
        let bar = |bench: &str| {
            let rows: Vec<_> = rows.iter().copied().filter(|row| row.bench == bench).collect();
            let length = median_of(&rows, |row| Some(row.ratio_raw_tcp.0))?;
            let rate = median_of(&rows, |row| Some(row.gbps.0))?;
            Some(Bar { note: format!("{} GB/s", text::decimal(rate)), ..Bar::new(length) })
        };
        let bars = ["pull", "push"].map(bar).into();
        Row { name: text::bytes(bytes), detail, tint: Tint::of_transport(&transport), bars }
    };
    let rows: Vec<_> = grouped(rows, key).into_iter().map(row).collect();
    let column = |title| Column { title, reference: Some("raw TCP"), width: 1 };
    (!rows.is_empty()).then(|| Panel {
        title: "Transfers between two processes".to_owned(),
        subtitle: "by size, as a fraction of the rate of one raw TCP stream".to_owned(),
        columns: vec![column("Pull"), column("Push")],
        has_common_scale: true,
        rows,
        ..Panel::default()
    })
}

/// Steps without a model, by level and transport: a panel for each case that was measured at the
/// most levels, and a note about the rows of other cases.
fn steps(rows: &[Step]) -> (Vec<Panel>, Option<String>) {
    let cases = grouped(rows, |row| row.case.clone());
    let levels = |rows: &[&Step]| grouped(rows.iter().copied(), |row| row.level.clone()).len();
    let most = cases.iter().map(|(_, rows)| levels(rows)).max().unwrap_or(0);
    let (shown, other): (Vec<_>, Vec<_>) =
        cases.into_iter().partition(|(_, rows)| levels(rows) == most);
    let note = (!other.is_empty()).then(|| {
        let number: usize = other.iter().map(|(_, rows)| rows.len()).sum();
        let rows = text::count(number as u64, "row");
        format!("not drawn: {rows} of \"step\": cases that were measured at fewer levels")
    });
    let panel = |(case, rows): &(Case, Vec<&Step>)| step(case, rows);
    (shown.iter().map(panel).collect(), note)
}

fn step(case: &Case, rows: &[&Step]) -> Panel {
    let levels = grouped(rows.iter().copied(), |row| row.level.clone());
    let variant = |row: &Step| {
        let wires = text::wires(&row.wire, &row.parameter_wire);
        (
            text::joined(&[Some(text::transport(&row.transport).to_owned()), wires]),
            row.transport.clone(),
        )
    };
    let rows = levels.into_iter().flat_map(|(level, rows)| {
        let row = move |((detail, transport), rows): ((String, String), Vec<&Step>)| {
            let seconds = median_of(&rows, |row| Some(row.seconds.0));
            let bar = |seconds| Bar {
                text: format!("{} s", text::decimal(seconds)),
                ..Bar::new(seconds)
            };
            let tint = Tint::of_transport(&transport);
            Row { name: level.clone(), detail, tint, bars: vec![seconds.map(bar)] }
        };
        grouped(rows, variant).into_iter().map(row)
    });
    let Case { params, tensors, workers, servers, replicas, dtype, state_dtype } = case;
    let named = |what: &str, dtype: &str| (dtype != "f32").then(|| format!("{dtype} {what}"));
    let replicas = (*replicas > 1).then(|| format!("{replicas} servers for each slice"));
    let subtitle = [
        Some(format!("{} in {}", text::parameters(*params), text::count(*tensors, "tensor"))),
        Some(text::count(*workers, "worker")),
        Some(text::count(*servers, "server")),
        replicas,
        named("parameters", dtype),
        named("state", state_dtype),
    ];
    Panel {
        title: "A step without a model: push, reduce, apply, pull".to_owned(),
        subtitle: text::joined(&subtitle),
        columns: vec![Column { title: "Step time", reference: None, width: 1 }],
        rows: rows.collect(),
        ..Panel::default()
    }
}

/// The speed of the optimizers on the largest measured number of threads.
fn optimizers(rows: &[Optimizer], notes: &mut Vec<String>) -> Option<Panel> {
    let threads = rows.iter().map(|row| row.threads).max()?;
    let shown = rows.iter().filter(|row| row.threads == threads);
    let other = rows.len() - shown.clone().count();
    if other > 0 {
        let rows = text::count(other as u64, "row");
        notes.push(format!("not drawn: {rows} of \"optimizer\": fewer threads"));
    }
    let variant = |row: &Optimizer| (row.system.clone(), row.state_dtype.clone());
    let row = |rows: &[&Optimizer], (system, state): (Option<String>, String)| {
        let rate = median_of(rows, |row| Some(row.gparams_per_s.0));
        let ratio = median_of(rows, |row| row.ratio_memory.map(|ratio| ratio.0));
        let bar = |rate| Bar { mark: ratio.map(|ratio| rate / ratio), ..Bar::new(rate) };
        let tint = match (&system, state.as_str()) {
            (Some(_), _) => Tint::Other,
            (None, "f32") => Tint::Wide,
            (None, _) => Tint::Narrow,
        };
        let name = rows.first().map(|row| row.optimizer.clone()).unwrap_or_default();
        let detail = text::joined(&[system, Some(format!("{state} state"))]);
        Row { name, detail, tint, bars: vec![rate.map(bar)] }
    };
    let names = grouped(shown, |row| row.optimizer.clone()).into_iter();
    let rows = names.flat_map(|(_, rows)| grouped(rows, variant));
    let rows: Vec<_> = rows.map(|(variant, rows)| row(&rows, variant)).collect();
    let limit = "the speed at which memory is copied or added to, whichever is faster";
    Some(Panel {
        title: "Optimizers on the CPU".to_owned(),
        subtitle: text::count(threads, "thread"),
        mark: Some(limit),
        columns: vec![Column { title: "G parameters per second", reference: None, width: 1 }],
        rows,
        ..Panel::default()
    })
}

/// The speed of the kernels of a GPU.
fn kernels(rows: &[Kernel]) -> Option<Panel> {
    let row = |(name, rows): (String, Vec<&Kernel>)| {
        let rate = median_of(&rows, |row| Some(row.gparams_per_s.0));
        let ratio = median_of(&rows, |row| Some(row.ratio_copy.0));
        let bar = |rate| Bar { mark: ratio.map(|ratio| rate / ratio), ..Bar::new(rate) };
        Row { name, detail: String::new(), tint: Tint::Wide, bars: vec![rate.map(bar)] }
    };
    let rows: Vec<_> = grouped(rows, |row| row.kernel.clone()).into_iter().map(row).collect();
    (!rows.is_empty()).then(|| Panel {
        title: "Kernels on the GPU".to_owned(),
        subtitle: "time of the device, without launches".to_owned(),
        mark: Some("the speed at which a kernel copies memory"),
        columns: vec![Column { title: "G parameters per second", reference: None, width: 1 }],
        rows,
        ..Panel::default()
    })
}
