//! Rows as `zs-bench --json` prints them, and the charts, tables and errors that they give.

use std::{fs, path::PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    Chart, Error, Options, markdown,
    panels::{self, Panel},
    rows::{self, Rows},
    run,
    tint::Tint,
};

fn machine() -> Value {
    json!({
        "processor": "AMD EPYC <9B14>", "cores": 2, "is_virtual": true, "memory_bytes": 24u64 << 30,
        "gpus": [], "date": "2026-11-28", "version": "0.1.0",
    })
}

/// A row of the system, whose step takes this many times that of DDP.
fn torch(system: &str, ratio: f64) -> Value {
    let is_ours = system == "zeroshard";
    json!({
        "bench": "torch", "model": "linear", "layers": 64, "width": 1024, "params": 67_108_864,
        "ranks": 2, "device": "cpu", "dtype": "f32", "rounds": 3, "system": system,
        "level": is_ours.then_some("os"), "clip": null,
        "transport": if is_ours { "shm" } else { "gloo" }, "wire": is_ours.then_some("f32"),
        "parameter_wire": is_ours.then_some("f32"), "seconds": ratio * 0.4, "ratio_ddp": ratio,
        "ratio_floor": is_ours.then_some(2.0), "rank0_peak_mib": 1500, "rank1_peak_mib": 1600,
        "gpu_peak_mib": null, "servers_peak_mib": is_ours.then_some(700), "machine": machine(),
    })
}

fn transfer(bench: &str, transport: &str, ratio: f64) -> Value {
    json!({
        "bench": bench, "bytes": 1 << 20, "connections": 1, "transport": transport, "gbps": 4.5,
        "ratio_raw_tcp": ratio, "machine": machine(),
    })
}

fn step(level: &str, workers: u32, seconds: f64) -> Value {
    json!({
        "bench": "step", "params": 67_108_864, "tensors": 64, "workers": workers, "servers": 2,
        "replicas": 1, "dtype": "f32", "state_dtype": "f32", "level": level, "transport": "grpc",
        "wire": "int8", "parameter_wire": "f32", "seconds": seconds, "machine": machine(),
    })
}

fn optimizer(state: &str, threads: u32, rate: f64) -> Value {
    json!({
        "bench": "optimizer", "optimizer": "adamw", "state_dtype": state, "threads": threads,
        "gparams_per_s": rate, "ratio_memory": 0.5, "machine": machine(),
    })
}

fn kernel(rate: f64) -> Value {
    json!({
        "bench": "kernels", "kernel": "squares", "gparams_per_s": rate, "ratio_copy": 0.9,
        "machine": machine(),
    })
}

/// One row of each kind.
fn each() -> [Value; 5] {
    let [torch, transfer] = [torch("zeroshard", 0.7), transfer("pull", "grpc", 0.9)];
    [torch, transfer, step("os", 2, 0.3), optimizer("f32", 2, 1.8), kernel(900.0)]
}

/// Writes a file in a folder that lives as long as the first value.
fn file(text: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("results.jsonl");
    fs::write(&path, text).unwrap();
    (folder, path)
}

fn read(text: &str) -> Result<Rows, rows::Error> {
    let (_folder, path) = file(text);
    Rows::read(&[path])
}

fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| format!("{row}\n")).collect()
}

fn rows(rows: &[Value]) -> Rows {
    read(&lines(rows)).unwrap()
}

fn panels(of: &[Value]) -> Vec<Panel> {
    panels::all(&rows(of)).0
}

fn svg(of: &[Value]) -> String {
    Chart { title: "A & B".to_owned(), subtitle: rows(of).machine(), panels: panels(of) }.svg()
}

/// The x and the width of the rectangles of this colour.
fn rectangles(svg: &str, (r, g, b): (u8, u8, u8)) -> Vec<(i32, i32)> {
    let colour = format!("fill=\"#{r:02X}{g:02X}{b:02X}\"");
    let number = |line: &str, name: &str| {
        let (_, rest) = line.split_once(&format!(" {name}=\"")).unwrap();
        rest.split('"').next().unwrap().parse().unwrap()
    };
    let found = svg.lines().filter(|line| line.starts_with("<rect") && line.contains(&colour));
    found.map(|line| (number(line, "x"), number(line, "width"))).collect()
}

fn bars(svg: &str, tint: Tint) -> Vec<(i32, i32)> {
    let colour = tint.rgb();
    rectangles(svg, (colour.0, colour.1, colour.2))
}

#[test]
fn bars_are_in_proportion_to_step_times_and_the_mark_is_at_the_floor() {
    let svg = svg(&[torch("ddp", 1.0), torch("fsdp2", 3.2), torch("zeroshard", 0.8)]);
    let [(left, ddp), (_, ddp_memory)] = bars(&svg, Tint::Ddp)[..] else { panic!("{svg}") };
    let [(_, fsdp2), (_, fsdp2_memory)] = bars(&svg, Tint::Fsdp2)[..] else { panic!("{svg}") };
    let [(_, ours), _] = bars(&svg, Tint::SharedMemory)[..] else { panic!("{svg}") };
    assert_eq!(ddp_memory, fsdp2_memory, "the peaks are the same");
    for (bar, ratio) in [(ddp, 1.0), (ours, 0.8)] {
        let exact = f64::from(fsdp2) / 3.2 * ratio;
        assert!((f64::from(bar) - exact).abs() <= 1.0, "{bar} instead of {exact}");
    }
    let marks = rectangles(&svg, (207, 34, 46));
    let [_in_the_key, (mark, _)] = marks[..] else { panic!("{marks:?}") };
    assert!((mark + 1 - left - ours / 2).abs() <= 1, "the floor is half of the step time");
    for label in ["A &amp; B", "AMD EPYC &lt;9B14&gt;, 2 virtual cores", "FSDP2", "ZeroShard os"] {
        assert!(svg.contains(label), "{label}");
    }
    for text in ["shared memory", "3.20", "1.28 s", "0.80", "0.32 s", "1,600", "67.11 M parameters"]
    {
        assert!(svg.contains(text), "{text}");
    }
}

#[test]
fn without_ddp_bars_show_seconds() {
    let mut row = torch("fsdp2", 3.0);
    row["ratio_ddp"] = Value::Null;
    let [panel] = &panels(&[torch("zeroshard", 0.5), row])[..] else { panic!("one panel") };
    let steps: Vec<_> = panel.rows.iter().filter_map(|row| row.bars[0].as_ref()).collect();
    let texts: Vec<_> = steps.iter().map(|bar| (bar.length, bar.text.as_str())).collect();
    assert_eq!(texts[0], (0.2, "0.20 s"));
    assert_eq!(texts[1].1, "1.20 s");
}

#[test]
fn several_rows_of_a_subject_give_their_median() {
    let of = [0.9, 0.5, 0.7].map(|ratio| torch("zeroshard", ratio));
    let [panel] = &panels(&of)[..] else { panic!("one panel") };
    let [row] = &panel.rows[..] else { panic!("one row") };
    assert_eq!(row.bars[0].as_ref().map(|bar| bar.length), Some(0.7));
    assert!(panel.subtitle.ends_with("medians of 9 rounds"), "{}", panel.subtitle);
}

#[test]
fn other_workloads_transports_and_wires_are_not_mixed() {
    let mut int8 = torch("zeroshard", 0.9);
    int8["wire"] = "int8".into();
    let mut large = torch("zeroshard", 0.9);
    large["params"] = 134_217_728.into();
    let found = panels(&[torch("zeroshard", 0.7), torch("ddp", 1.0), int8, large]);
    let names = |panel: &Panel| {
        let rows = panel.rows.iter().map(|row| format!("{}: {}", row.name, row.detail));
        rows.collect::<Vec<_>>()
    };
    let ours = "ZeroShard os: shared memory";
    assert_eq!(names(&found[0]), [ours, &format!("{ours}, int8 gradients"), "DDP: gloo"]);
    assert_eq!(names(&found[1]), [ours]);
}

#[test]
fn each_benchmark_has_a_panel() {
    let titles: Vec<_> = panels(&each()).into_iter().map(|panel| panel.title).collect();
    let expected = [
        "A training step in PyTorch: time and peak memory",
        "Transfers between two processes",
        "A step without a model: push, reduce, apply, pull",
        "Optimizers on the CPU",
        "Kernels on the GPU",
    ];
    assert_eq!(titles, expected);
}

#[test]
fn pull_and_push_share_a_scale() {
    let svg = svg(&[transfer("pull", "grpc", 0.6), transfer("push", "grpc", 1.2)]);
    let [(_, pull), (_, push)] = bars(&svg, Tint::Grpc)[..] else { panic!("{svg}") };
    assert!((push - 2 * pull).abs() <= 2, "{pull} and {push}");
    assert!(svg.contains("raw TCP") && svg.contains("1 MiB") && svg.contains("4.50 GB/s"));
}

#[test]
fn steps_of_the_case_with_the_most_levels_are_drawn_and_the_others_are_named() {
    let of = [step("os", 1, 0.2), step("os", 2, 0.3), step("os_g", 2, 0.4)];
    let (panels, notes) = panels::all(&rows(&of));
    let [panel] = &panels[..] else { panic!("{panels:?}") };
    assert_eq!(panel.rows.iter().map(|row| &*row.name).collect::<Vec<_>>(), ["os", "os_g"]);
    assert_eq!(panel.rows[0].detail, "gRPC, int8 gradients");
    assert_eq!(notes.len(), 1);
    assert!(notes[0].contains("1 row of \"step\""), "{notes:?}");
}

#[test]
fn steps_of_other_dtypes_are_not_mixed() {
    let mut narrow = step("os", 2, 0.1);
    narrow["dtype"] = "bf16".into();
    narrow["state_dtype"] = "int8".into();
    let [wide, narrow] = &panels(&[step("os", 2, 0.3), narrow])[..] else { panic!("two panels") };
    let seconds = |panel: &Panel| panel.rows[0].bars[0].as_ref().map(|bar| bar.length);
    assert_eq!((seconds(wide), seconds(narrow)), (Some(0.3), Some(0.1)));
    assert!(narrow.subtitle.ends_with("bf16 parameters, int8 state"), "{}", narrow.subtitle);
}

#[test]
fn optimizers_are_drawn_on_the_most_threads_with_each_state_and_peer() {
    let mut peer = optimizer("f32", 2, 0.9);
    peer["system"] = "torch".into();
    let of = [optimizer("f32", 1, 1.0), optimizer("f32", 2, 1.8), optimizer("int8", 2, 2.8), peer];
    let [panel] = &panels(&of)[..] else { panic!("one panel") };
    let shown = |row: &panels::Row| (row.detail.clone(), row.bars[0].as_ref().unwrap().length);
    let shown: Vec<_> = panel.rows.iter().map(shown).collect();
    let expected = [("f32 state", 1.8), ("int8 state", 2.8), ("torch, f32 state", 0.9)];
    assert_eq!(shown, expected.map(|(detail, rate)| (detail.to_owned(), rate)));
}

#[test]
fn rows_that_have_no_panel_are_named_and_the_others_are_drawn() {
    let other = |bench: &str| json!({"bench": bench});
    let of = [other("recovery"), torch("ddp", 1.0), other("flights"), other("flights")];
    let rows = rows(&of);
    let notes: Vec<_> = rows.notes().collect();
    assert!(notes[0].contains("2 rows of \"flights\", first in"), "{notes:?}");
    assert!(notes[0].contains("results.jsonl:3: zs-bench has no such benchmark"), "{notes:?}");
    assert!(notes[1].contains("1 row of \"recovery\""), "{notes:?}");
    assert!(!rows.is_empty());
}

#[test]
fn a_line_that_is_no_row_is_named() {
    let good = torch("ddp", 1.0).to_string();
    for bad in ["round 1/3: ddp: 0.4 s", "3", "[]", "{}", "null", "{\"bench\": 3}", &good[..200]] {
        let error = read(&format!("{good}\n\n{bad}\n")).unwrap_err();
        assert!(matches!(error, rows::Error::NotRow { .. }), "{error:?}");
        assert!(error.to_string().contains("results.jsonl:3 is not"), "{error}");
    }
}

#[test]
fn no_value_of_a_field_causes_a_panic() {
    let wrong =
        [json!(null), json!(-1), json!(0), json!("x"), json!(1e308), json!(1e-308), json!([])];
    let wrong = [&wrong[..], &[json!(u64::MAX), json!("\u{0}ü".repeat(1000))]].concat();
    for row in each() {
        let fields: Vec<_> = row.as_object().unwrap().keys().cloned().collect();
        for (field, value) in
            fields.iter().flat_map(|field| wrong.iter().map(move |it| (field, it)))
        {
            let mut changed = row.clone();
            changed[field] = value.clone();
            if let Ok(rows) = read(&lines(&[row.clone(), changed])) {
                let (panels, _) = panels::all(&rows);
                let svg = Chart { panels, ..Chart::default() }.svg();
                assert!(svg.ends_with("</svg>\n") && !svg.contains('\u{0}'), "{field} = {value}");
                markdown::table(&rows);
            }
        }
    }
}

#[test]
fn invalid_and_missing_fields_are_named() {
    let mut cases = [(); 3].map(|()| torch("ddp", 1.0));
    cases[0]["seconds"] = json!(-1);
    cases[1].as_object_mut().unwrap().remove("seconds");
    cases[2].as_object_mut().unwrap().remove("machine");
    let reasons =
        ["-1 is not a positive number", "missing field `seconds`", "missing field `machine`"];
    for (row, reason) in cases.iter().zip(reasons) {
        let error = read(&row.to_string()).unwrap_err();
        assert!(matches!(error, rows::Error::Row { .. }), "{error:?}");
        let error = error.to_string();
        assert!(error.contains("results.jsonl:1: invalid row of torch"), "{error}");
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn results_of_two_machines_are_refused_and_those_of_two_days_are_not() {
    let mut other = torch("fsdp2", 2.0);
    other["machine"]["date"] = "2026-11-30".into();
    assert_eq!(rows(&[torch("ddp", 1.0), other.clone()]).date(), "2026-11-28 to 2026-11-30");
    for (field, value) in [("cores", json!(4)), ("version", json!("0.2.0"))] {
        let mut other = other.clone();
        other["machine"][field] = value;
        let error = read(&lines(&[torch("ddp", 1.0), other])).unwrap_err();
        assert!(matches!(error, rows::Error::OtherMachine { .. }), "{error:?}");
        assert!(error.to_string().contains("results.jsonl:2"), "{error}");
    }
}

#[test]
fn the_table_names_the_machine_and_has_the_columns_that_were_measured() {
    let table = markdown::table(&rows(&[torch("ddp", 1.0), torch("zeroshard", 0.7)])).unwrap();
    let expected = "\
<!-- zs-bench chart --table -->
64 linear layers of 1024 x 1024 (67.11 M parameters), 2 ranks on the CPU, f32; medians of 3 rounds.
Measured with ZeroShard 0.1.0 on 2026-11-28: AMD EPYC <9B14>, 2 virtual cores, 24 GiB of memory.

| system | level | transport | seconds | x DDP | x floor | rank, MiB | servers, MiB |
|---|---|---|---|---|---|---|---|
| DDP | - | gloo | 0.400 | 1.00 | - | 1,600 | - |
| ZeroShard | `os` | shared memory | 0.280 | 0.70 | 2.00 | 1,600 | 700 |

<!-- zs-bench chart --table: end -->";
    assert_eq!(table, expected);
}

#[test]
fn a_run_that_has_nothing_to_draw_or_cannot_write_says_so() {
    let run_with = |text: &str, out: Option<&str>| {
        let (folder, path) = file(text);
        let out = out.map(|name| folder.path().join(name));
        run(&Options { files: vec![path], table: out.is_none(), out })
    };
    let of = |rows: &[Value]| lines(rows);
    assert!(matches!(run_with("", Some("chart.svg")), Err(Error::Nothing)));
    let unknown = of(&[json!({"bench": "flights"})]);
    assert!(matches!(run_with(&unknown, Some("chart.svg")), Err(Error::Nothing)));
    assert!(matches!(run_with(&of(&[kernel(1.0)]), None), Err(Error::NoTable)));
    let error = run_with(&of(&[kernel(1.0)]), Some("missing/chart.svg")).unwrap_err();
    assert!(matches!(error, Error::Write { .. }), "{error}");
    assert!(run_with(&of(&[kernel(1.0)]), Some("chart.svg")).is_ok());
    let missing = Rows::read(&["/missing/file".into()]).unwrap_err();
    assert!(matches!(missing, rows::Error::Read { .. }), "{missing}");
}
