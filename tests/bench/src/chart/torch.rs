//! Step times and memory of `zs-bench torch`: one subject for each system, level, transport and
//! wire, with the medians of its rows.

use super::{
    group::{grouped, median_of},
    rows::{Torch, Workload},
    text,
    tint::Tint,
};

/// The subjects that trained the same workload.
#[derive(Debug)]
pub(super) struct Comparison {
    pub(super) workload: Workload,
    /// The least and the greatest number of rounds of a subject.
    rounds: (u64, u64),
    pub(super) subjects: Vec<Subject>,
}

/// The medians of one subject.
#[derive(Debug)]
pub(super) struct Subject {
    pub(super) system: String,
    pub(super) level: Option<String>,
    /// The transport, the wire and the way of clipping.
    pub(super) detail: String,
    pub(super) tint: Tint,
    pub(super) seconds: f64,
    pub(super) x_ddp: Option<f64>,
    pub(super) x_floor: Option<f64>,
    /// Of the rank with the highest peak.
    pub(super) peak_mib: Option<f64>,
    pub(super) gpu_peak_mib: Option<f64>,
    pub(super) servers_peak_mib: Option<f64>,
}

impl Subject {
    /// The medians of rows of the same subject.
    fn new(rows: &[&Torch]) -> Option<Self> {
        let Torch { system, level, clip, transport, wire, parameter_wire, .. } = *rows.first()?;
        let wires = wire.as_deref().zip(parameter_wire.as_deref());
        let detail = [
            transport.as_deref().map(|name| text::transport(name).to_owned()),
            wires.and_then(|(gradients, parameters)| text::wires(gradients, parameters)),
            clip.as_ref().map(|clip| format!("clip {clip}")),
        ];
        let tint = match (system.as_str(), transport) {
            ("zeroshard", Some(transport)) => Tint::of_transport(transport),
            (peer, _) => Tint::of_peer(peer),
        };
        let mib = |peak: fn(&Torch) -> Option<u64>| {
            median_of(rows, |row| peak(row).map(|mib| mib as f64))
        };
        Some(Self {
            system: text::system(system).to_owned(),
            level: level.clone(),
            detail: text::joined(&detail),
            tint,
            seconds: median_of(rows, |row| Some(row.seconds.0))?,
            x_ddp: median_of(rows, |row| row.ratio_ddp.map(|ratio| ratio.0)),
            x_floor: median_of(rows, |row| row.ratio_floor.map(|ratio| ratio.0)),
            peak_mib: mib(|row| row.rank0_peak_mib.max(row.rank1_peak_mib)),
            gpu_peak_mib: mib(|row| row.gpu_peak_mib),
            servers_peak_mib: mib(|row| row.servers_peak_mib),
        })
    }

    /// The system and the level.
    pub(super) fn name(&self) -> String {
        match &self.level {
            Some(level) => format!("{} {level}", self.system),
            None => self.system.clone(),
        }
    }
}

/// Returns the comparisons in the order of the rows. Subjects that differ only in their transport,
/// wire or clipping follow each other.
pub(super) fn comparisons(rows: &[Torch]) -> Vec<Comparison> {
    let workloads = grouped(rows, |row| row.workload.clone()).into_iter();
    let comparison = |(workload, rows): (Workload, Vec<&Torch>)| {
        let names = grouped(rows, |row| (row.system.clone(), row.level.clone()));
        let variant = |row: &Torch| {
            let Torch { transport, wire, parameter_wire, clip, .. } = row.clone();
            [transport, wire, parameter_wire, clip]
        };
        let subjects = names.into_iter().flat_map(|(_, rows)| grouped(rows, variant));
        let subjects: Vec<_> = subjects.map(|(_, rows)| rows).collect();
        let rounds =
            subjects.iter().map(|rows| rows.iter().map(|row| u64::from(row.rounds)).sum::<u64>());
        Comparison {
            workload,
            rounds: rounds.fold((u64::MAX, 0), |(min, max), n| (min.min(n), max.max(n))),
            subjects: subjects.iter().filter_map(|rows| Subject::new(rows)).collect(),
        }
    };
    workloads.map(comparison).collect()
}

impl Comparison {
    /// Describes the workload and the number of rounds.
    pub(super) fn description(&self) -> String {
        let Workload { model, layers, width, params, ranks, device, dtype } = &self.workload;
        let model = match model.as_str() {
            "linear" => format!("{layers} linear layers of {width} x {width}"),
            "gpt2" => format!("GPT-2 with {} of width {width}", text::count(*layers, "layer")),
            other => format!("{other} with {} of width {width}", text::count(*layers, "layer")),
        };
        let device = if device == "cuda" { "a GPU" } else { "the CPU" };
        let rounds = match self.rounds {
            (1, 1) => "one round".to_owned(),
            (least, most) if least == most => format!("medians of {most} rounds"),
            (least, most) => format!("medians of {least} to {most} rounds"),
        };
        let parameters = text::parameters(*params);
        let ranks = text::count(*ranks, "rank");
        format!("{model} ({parameters}), {ranks} on {device}, {dtype}; {rounds}")
    }
}
