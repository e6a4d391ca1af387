//! Each class of instructions, in a kernel of its own, and the structure of launches.

use std::sync::Arc;

use super::*;
use crate::{
    fault::Kind,
    memory::Memory,
    order::{Clock, Stamp},
    ptx::Module,
};

const HEAD: &str = ".version 8.4\n.target sm_80\n.address_size 64\n";

/// The device memory of one allocation, and a way to run kernels on it.
struct Subject {
    memory: Memory,
    base: u64,
    size: usize,
    stamp: Arc<Stamp>,
}

impl Subject {
    fn new(words: &[u64]) -> Self {
        let mut memory = Memory::new(0, 1 << 20);
        let size = 8 * words.len();
        let base = memory.reserve(size as u64).unwrap();
        let stamp = Arc::new(Stamp { stream: 0, clock: Clock::default(), name: "test".to_owned() });
        memory.allocate(base, &stamp);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        memory.touch(base, size as u64, true, &stamp).unwrap().copy_from_slice(&bytes);
        Self { memory, base, size, stamp }
    }

    /// Runs a kernel, whose only parameter is the address of the memory.
    fn run(&mut self, body: &str, blocks: u32, threads: u32, seed: u64) -> Result<u64, Fault> {
        let text = format!("{HEAD}.visible .entry k(.param .u64 p)\n{{\n{body}\nret;\n}}");
        let module = Module::read(&text).unwrap();
        let kernel = Arc::new(module.kernels["k"].clone());
        let parameters = self.base.to_le_bytes().to_vec();
        let launch = Launch { kernel, blocks, threads, parameters };
        let mut windows = Windows::new(&mut self.memory, launch.kernel.sites);
        let instructions = launch.run(&mut windows, &mut Random::new(seed))?;
        windows.finish(&self.stamp);
        Ok(instructions)
    }

    fn words(&mut self) -> Vec<u64> {
        let bytes = self.memory.touch(self.base, self.size as u64, false, &self.stamp).unwrap();
        bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
    }
}

/// The result of an instruction with operands of 64 bits: `{}` in the text are a result and
/// operands.
fn result(instruction: &str, operands: &[u64]) -> u64 {
    let mut words = operands.to_vec();
    words.push(0);
    let mut body = "ld.param.u64 %rd0, [p];\n".to_owned();
    for index in 0..operands.len() {
        body += &format!("ld.global.u64 %a{index}, [%rd0+{}];\n", 8 * index);
    }
    body += instruction;
    body += &format!(";\nst.global.u64 [%rd0+{}], %r;", 8 * operands.len());
    let mut subject = Subject::new(&words);
    subject.run(&body, 1, 1, 0).unwrap();
    *subject.words().last().unwrap()
}

fn bits(value: f32) -> u64 {
    value.to_bits().into()
}

#[test]
fn integers_have_the_width_of_the_instruction() {
    let all = u64::from(u32::MAX);
    for (instruction, operands, expected) in [
        ("add.s32 %r, %a0, %a1", [all, 2], 1),
        ("add.s64 %r, %a0, %a1", [all, 2], all + 2),
        ("sub.s32 %r, %a0, %a1", [1, 2], all),
        ("sub.s64 %r, %a0, %a1", [1, 2], u64::MAX),
        ("mul.lo.s32 %r, %a0, %a1", [1 << 31, 2], 0),
        ("mul.lo.s64 %r, %a0, %a1", [1 << 31, 2], 1 << 32),
        ("mul.wide.u32 %r, %a0, %a1", [all, all], all * all),
        ("div.u32 %r, %a0, %a1", [7, 2], 3),
        ("div.u64 %r, %a0, %a1", [1 << 40, 1 << 38], 4),
        ("min.u64 %r, %a0, %a1", [7, 9], 7),
        ("max.u64 %r, %a0, %a1", [7, 9], 9),
        ("min.u32 %r, %a0, %a1", [all, 9], 9),
        ("max.u32 %r, %a0, %a1", [all, 9], all),
        ("neg.s64 %r, %a0", [1, 0], u64::MAX),
        ("and.b32 %r, %a0, %a1", [6, 3], 2),
        ("or.b64 %r, %a0, %a1", [6, 3], 7),
        ("xor.b32 %r, %a0, %a1", [6, 3], 5),
        ("xor.b64 %r, %a0, %a1", [1 << 40, 3], 1 << 40 | 3),
        ("not.b32 %r, %a0", [0, 0], all),
        ("not.b64 %r, %a0", [0, 0], u64::MAX),
        ("shl.b32 %r, %a0, %a1", [3, 31], 1 << 31),
        ("shl.b32 %r, %a0, %a1", [3, 32], 0),
        ("shl.b64 %r, %a0, %a1", [3, 32], 3 << 32),
        ("shr.u32 %r, %a0, %a1", [all, 28], 15),
        ("shr.u64 %r, %a0, %a1", [u64::MAX, 64], 0),
        ("cvt.u32.u64 %r, %a0", [1 << 32 | 5, 0], 5),
        ("cvt.u64.u32 %r, %a0", [all, 0], all),
        ("mov.u32 %r, -1", [0, 0], all),
    ] {
        assert_eq!(result(instruction, &operands), expected, "{instruction} of {operands:?}");
    }
}

#[test]
fn floating_point_rounds_to_nearest_and_nan_is_canonical() {
    let third = 1.0f32 / 3.0;
    for (instruction, operands, expected) in [
        ("add.rn.f32 %r, %a0, %a1", [bits(0.1), bits(0.2)], bits(0.1 + 0.2)),
        ("sub.rn.f32 %r, %a0, %a1", [bits(1.0), bits(third)], bits(1.0 - third)),
        ("mul.rn.f32 %r, %a0, %a1", [bits(third), bits(third)], bits(third * third)),
        ("div.rn.f32 %r, %a0, %a1", [bits(1.0), bits(3.0)], bits(third)),
        ("div.rn.f32 %r, %a0, %a1", [bits(1e-40), bits(2.0)], bits(1e-40 / 2.0)),
        ("sqrt.rn.f32 %r, %a0", [bits(2.0), 0], bits(2f32.sqrt())),
        ("sqrt.rn.f32 %r, %a0", [bits(-2.0), 0], 0x7fff_ffff),
        ("add.rn.f32 %r, %a0, %a1", [0xffc0_1234, bits(1.0)], 0x7fff_ffff),
        ("neg.f32 %r, %a0", [bits(-0.0), 0], bits(0.0)),
        ("abs.f32 %r, %a0", [bits(-3.0), 0], bits(3.0)),
        ("add.rn.f32 %r, %a0, 0f3F000000", [bits(1.0), 0], bits(1.5)),
        ("cvt.f64.f32 %r, %a0", [bits(third), 0], f64::from(third).to_bits()),
        ("cvt.rn.f32.f64 %r, %a0", [(1.0f64 / 3.0).to_bits(), 0], bits(third)),
        ("cvt.rn.f64.u64 %r, %a0", [u64::MAX, 0], (u64::MAX as f64).to_bits()),
        ("mul.rn.f64 %r, %a0, %a1", [0.1f64.to_bits(); 2], (0.1f64 * 0.1).to_bits()),
        ("sqrt.rn.f64 %r, %a0", [2f64.to_bits(), 0], 2f64.sqrt().to_bits()),
        ("max.f64 %r, %a0, %a1", [f64::NAN.to_bits(), 2f64.to_bits()], 2f64.to_bits()),
    ] {
        assert_eq!(result(instruction, &operands), expected, "{instruction} of {operands:x?}");
    }
}

#[test]
fn predicates_compare_and_select() {
    let nan = bits(f32::NAN);
    let wide_nan = f64::NAN.to_bits();
    for (comparison, operands, holds) in [
        ("eq.s32", [5, 5], true),
        ("ne.s64", [5, 5], false),
        ("eq.s16", [0, 1], false),
        ("lt.u64", [5, u64::MAX], true),
        ("gt.u32", [5, 7], false),
        ("ge.u64", [7, 7], true),
        ("eq.f32", [bits(0.0), bits(-0.0)], true),
        ("eq.f32", [nan, nan], false),
        ("lt.f32", [bits(-1.0), bits(1.0)], true),
        ("gt.f32", [nan, bits(1.0)], false),
        ("geu.f32", [nan, bits(1.0)], true),
        ("geu.f32", [bits(0.5), bits(1.0)], false),
        ("gt.f64", [2f64.to_bits(), 1f64.to_bits()], true),
        ("leu.f64", [wide_nan, 1f64.to_bits()], true),
        ("leu.f64", [2f64.to_bits(), 1f64.to_bits()], false),
    ] {
        let text = format!("setp.{comparison} %p, %a0, %a1; selp.b32 %r, 1, 2, %p");
        assert_eq!(result(&text, &operands) == 1, holds, "{comparison} of {operands:x?}");
    }
}

#[test]
fn small_elements_are_loaded_with_zeros_and_stored_alone() {
    let body = "ld.param.u64 %rd0, [p]; ld.global.nc.u16 %rs0, [%rd0+2];
        st.global.u16 [%rd0+6], %rs0; st.global.u64 [%rd0+8], %rs0;";
    let mut subject = Subject::new(&[0x1111_2222_3333_4444, u64::MAX]);
    subject.run(body, 1, 1, 0).unwrap();
    assert_eq!(subject.words(), [0x3333_2222_3333_4444, 0x3333]);
    let body = "ld.param.u64 %rd0, [p]; ld.global.u8 %rs0, [%rd0+3];
        st.global.u8 [%rd0+1], %rs0; st.global.u64 [%rd0+8], %rs0;";
    let mut subject = Subject::new(&[0x1111_2222_7733_4444, u64::MAX]);
    subject.run(body, 1, 1, 0).unwrap();
    assert_eq!(subject.words(), [0x1111_2222_7733_7744, 0x77]);
}

/// Each thread adds the odd numbers below its own by a loop, and writes the sum.
const LOOP: &str = "
    ld.param.u64 %rd0, [p]; mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x;
    mul.lo.s32 %r3, %r1, %r2; add.s32 %r0, %r0, %r3;
    mov.u64 %rd1, 0; mov.u32 %r4, 0;
    $loop: setp.ge.u32 %p0, %r4, %r0; @%p0 bra $end;
    and.b32 %r5, %r4, 1; setp.eq.s32 %p1, %r5, 0; @%p1 bra $even;
    cvt.u64.u32 %rd3, %r4; add.s64 %rd1, %rd1, %rd3;
    $even: add.s32 %r4, %r4, 1; bra.uni $loop;
    $end: mul.wide.u32 %rd2, %r0, 8; add.s64 %rd2, %rd0, %rd2; st.global.u64 [%rd2], %rd1;";

#[test]
fn threads_part_and_meet_again() {
    for (blocks, threads) in [(1, 128), (3, 40), (128, 1), (2, 64)] {
        for seed in 0..4 {
            let mut subject = Subject::new(&[0; 128]);
            subject.run(LOOP, blocks, threads, seed).unwrap();
            for (thread, sum) in (0..u64::from(blocks * threads)).zip(subject.words()) {
                assert_eq!(sum, (0..thread).filter(|odd| odd % 2 == 1).sum());
            }
        }
    }
}

/// Each thread reads what its neighbour has written to shared memory.
fn neighbours(barrier: &str) -> String {
    format!(
        ".shared .align 8 .b8 lanes[1024];
        ld.param.u64 %rd0, [p]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd1, %r0, 8;
        mov.u64 %rd2, lanes; add.s64 %rd3, %rd2, %rd1; cvt.u64.u32 %rd4, %r0;
        st.shared.u64 [%rd3], %rd4; {barrier}
        add.s32 %r1, %r0, 1; and.b32 %r1, %r1, 127; mul.wide.u32 %rd5, %r1, 8;
        add.s64 %rd5, %rd2, %rd5; ld.shared.u64 %rd6, [%rd5];
        add.s64 %rd7, %rd0, %rd1; st.global.u64 [%rd7], %rd6;"
    )
}

#[test]
fn a_barrier_separates_phases_and_without_it_the_result_is_wrong() {
    let expected: Vec<u64> = (0..128).map(|thread| (thread + 1) % 128).collect();
    for seed in 0..10 {
        let mut subject = Subject::new(&[0; 128]);
        subject.run(&neighbours("bar.sync 0;"), 1, 128, seed).unwrap();
        assert_eq!(subject.words(), expected);
        subject.run(&neighbours(""), 1, 128, seed).unwrap();
        assert_ne!(subject.words(), expected, "seed {seed} hides a missing barrier");
    }
}

#[test]
fn bad_addresses_are_found_and_named() {
    for (access, kind) in [
        ("ld.global.u64 %rd1, [%rd0+8]", Kind::OutOfBounds),
        ("ld.global.u64 %rd1, [%rd0+4]", Kind::OutOfBounds),
        ("st.global.u32 [%rd0+2], 1", Kind::Misaligned),
        ("mov.u64 %rd1, 64; ld.global.u32 %r1, [%rd1]", Kind::NotAllocated),
        ("mov.u64 %rd1, lanes; ld.shared.u64 %rd2, [%rd1+1024]", Kind::OutOfBounds),
        ("mov.u64 %rd1, lanes; ld.shared.u64 %rd2, [%rd1+4]", Kind::Misaligned),
    ] {
        let body = format!(".shared .align 8 .b8 lanes[1024]; ld.param.u64 %rd0, [p]; {access};");
        let fault = Subject::new(&[0]).run(&body, 1, 1, 0).unwrap_err();
        assert_eq!(fault.kind, kind, "{access}: {fault}");
    }
}

#[test]
fn a_module_with_an_unknown_instruction_is_refused() {
    for instruction in [
        "fma.rn.f32 %f1, %f2, %f3, %f4",
        "add.f32 %f1, %f2, %f3",
        "ld.global.v2.f32 {%f1, %f2}, [%rd1]",
        "mov.u32 %r1, %laneid.x",
        "bra $nowhere",
        "ld.param.u64 %rd1, [other]",
    ] {
        let text = format!("{HEAD}.visible .entry k(.param .u64 p) {{ {instruction}; ret; }}");
        assert!(Module::read(&text).is_err(), "{instruction}");
    }
}

#[test]
fn the_kernels_of_the_server_are_known() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../server/kernels/src/cuda/kernels.ptx");
    let module = Module::read(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(module.kernels.len(), 38);
}
