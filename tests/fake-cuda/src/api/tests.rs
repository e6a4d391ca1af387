//! Each kind of fault, by the calls of a program.

use std::{ffi::c_void, ptr::null_mut};

use super::{contexts::*, memory::*, modules::*, streams::*};
use crate::{codes::*, control::*, driver::with_device};

/// Doubles 1,024 words.
const PTX: &std::ffi::CStr = c".version 8.4
    .visible .entry twice(.param .u64 p) {
        ld.param.u64 %rd0, [p]; mov.u32 %r0, %tid.x; mul.wide.u32 %rd1, %r0, 4;
        add.s64 %rd2, %rd0, %rd1; ld.global.u32 %r1, [%rd2]; add.s32 %r1, %r1, %r1;
        st.global.u32 [%rd2], %r1; ret;
    }";
const SIZE: usize = 4096;

/// A device with streams, memory and a kernel.
struct Program {
    device: usize,
    streams: [u64; 2],
    memory: u64,
    pinned: *mut c_void,
    module: u64,
    twice: u64,
}

fn ok(code: Code) {
    assert_eq!(code, SUCCESS);
}

impl Program {
    fn new(seed: u64) -> Self {
        let device = fake_cuda_add_device(seed, 1 << 20);
        let mut context = 0;
        let (mut streams, mut memory, mut pinned) = ([0; 2], 0, null_mut());
        let (mut module, mut twice) = (0, 0);
        // SAFETY: all pointers are to memory for the results.
        unsafe {
            ok(cuDevicePrimaryCtxRetain(&mut context, device as i32));
            ok(cuCtxSetCurrent(context));
            streams.iter_mut().for_each(|stream| ok(cuStreamCreate(stream, 1)));
            ok(cuMemAlloc_v2(&mut memory, SIZE));
            ok(cuMemHostAlloc(&mut pinned, SIZE, 0));
            pinned.cast::<u32>().write_bytes(0, SIZE / 4);
            ok(cuModuleLoadData(&mut module, PTX.as_ptr().cast()));
            ok(cuModuleGetFunction(&mut twice, module, c"twice".as_ptr()));
        }
        Self { device, streams, memory, pinned, module, twice }
    }

    /// Launches the kernel on an address.
    fn launch(&self, stream: usize, mut address: u64) -> Code {
        let mut arguments: [*mut c_void; 1] = [(&raw mut address).cast()];
        let (stream, arguments) = (self.streams[stream], arguments.as_mut_ptr());
        // SAFETY: the kernel has one parameter of this type.
        unsafe { cuLaunchKernel(self.twice, 1, 1, 1, 128, 1, 1, 0, stream, arguments, null_mut()) }
    }

    fn upload(&self, stream: usize) -> Code {
        cuMemcpyHtoDAsync_v2(self.memory, self.pinned, SIZE, self.streams[stream])
    }

    fn download(&self, stream: usize) -> Code {
        cuMemcpyDtoHAsync_v2(self.pinned, self.memory, SIZE, self.streams[stream])
    }

    fn faults(&self) -> Vec<String> {
        with_device(self.device, |device| std::mem::take(&mut device.faults)).unwrap()
    }

    /// Frees everything, and asserts that nothing else was wrong.
    fn end(self) {
        ok(cuCtxSynchronize());
        ok(cuMemFree_v2(self.memory));
        ok(cuMemFreeHost(self.pinned));
        self.streams.iter().for_each(|stream| ok(cuStreamDestroy_v2(*stream)));
        ok(cuModuleUnload(self.module));
        ok(cuDevicePrimaryCtxRelease_v2(self.device as i32));
        assert_eq!(self.faults(), Vec::<String>::new());
    }
}

/// Runs a program with many seeds, and asserts that it has only faults of one kind.
fn assert_found(kind: &str, program: impl Fn(&Program)) {
    for seed in 0..50 {
        let subject = Program::new(seed);
        program(&subject);
        cuCtxSynchronize();
        let faults = subject.faults();
        let are_of_kind = faults.iter().all(|fault| fault.contains(&format!(": {kind}: ")));
        assert!(!faults.is_empty() && are_of_kind, "seed {seed}: {faults:?}");
    }
}

#[test]
fn a_program_without_faults_has_its_results_and_none_are_reported() {
    for seed in 0..200 {
        let subject = Program::new(seed);
        let mut event = 0;
        // SAFETY: the pinned memory has as many words.
        unsafe {
            ok(cuEventCreate(&mut event, 2));
            subject.pinned.cast::<u32>().write(21);
        }
        ok(subject.upload(0));
        ok(cuEventRecord(event, subject.streams[0]));
        ok(cuStreamWaitEvent(subject.streams[1], event, 0));
        ok(subject.launch(1, subject.memory));
        ok(subject.download(1));
        ok(cuStreamSynchronize(subject.streams[1]));
        // SAFETY: as above.
        assert_eq!(unsafe { subject.pinned.cast::<u32>().read() }, 42);
        ok(cuEventDestroy_v2(event));
        subject.end();
    }
}

#[test]
fn a_missing_event_wait_is_a_race() {
    assert_found("race", |program| {
        ok(program.upload(0));
        ok(program.launch(1, program.memory));
    });
    assert_found("race", |program| {
        ok(program.launch(0, program.memory));
        ok(program.download(1));
    });
    // An event that was recorded before the launch does not order what comes after it.
    assert_found("race", |program| {
        let mut event = 0;
        // SAFETY: the pointer is to memory for the result.
        ok(unsafe { cuEventCreate(&mut event, 2) });
        ok(cuEventRecord(event, program.streams[0]));
        ok(program.launch(0, program.memory));
        ok(cuStreamWaitEvent(program.streams[1], event, 0));
        ok(program.launch(1, program.memory));
    });
}

#[test]
fn a_use_of_freed_memory_is_found() {
    assert_found("use after free", |program| {
        ok(cuMemFreeAsync(program.memory, program.streams[0]));
        ok(program.launch(0, program.memory));
    });
}

/// The launch comes first by chance, or the free does.
#[test]
fn a_free_that_does_not_wait_is_found() {
    let mut races = 0;
    for seed in 0..50 {
        let program = Program::new(seed);
        ok(program.launch(0, program.memory));
        ok(cuMemFreeAsync(program.memory, program.streams[1]));
        let _ = cuCtxSynchronize();
        let faults = program.faults();
        let is_race = faults.iter().all(|of| of.contains(": race: "));
        assert!(is_race || faults.iter().any(|of| of.contains(": use after free: ")), "{faults:?}");
        races += usize::from(is_race && !faults.is_empty());
    }
    assert!((1..50).contains(&races), "{races}");
}

#[test]
fn a_use_before_the_allocation_is_found() {
    let mut found = 0;
    for seed in 0..50 {
        let program = Program::new(seed);
        let mut memory = 0;
        // SAFETY: the pointer is to memory for the result.
        ok(unsafe { cuMemAllocAsync(&mut memory, SIZE, program.streams[0]) });
        program.launch(1, memory);
        let _ = cuCtxSynchronize();
        let faults = program.faults();
        // The allocation came first by chance, or the launch did.
        let is_race = faults.iter().all(|of| of.contains(": race: "));
        let is_early = faults.iter().all(|of| of.contains(": use before allocation: "));
        assert!(!faults.is_empty() && (is_race || is_early), "{faults:?}");
        found += usize::from(is_early);
    }
    assert!(found > 0);
}

#[test]
fn accesses_outside_memory_are_found() {
    assert_found("out of bounds", |program| ok(program.launch(0, program.memory + 4096 - 256)));
    assert_found("misaligned", |program| ok(program.launch(0, program.memory + 2)));
    assert_found("not allocated", |program| ok(program.launch(0, 4096)));
    assert_found("not allocated", |program| ok(program.launch(0, program.pinned as u64)));
    assert_found("out of bounds", |program| {
        let (stream, size) = (program.streams[0], SIZE);
        ok(cuMemcpyHtoDAsync_v2(program.memory + 8, program.pinned, size, stream));
    });
}

#[test]
fn copies_from_and_to_memory_that_is_not_pinned_are_found() {
    let mut bytes = vec![0u8; SIZE];
    let pageable = bytes.as_mut_ptr() as usize;
    assert_found("not pinned", |program| {
        let stream = program.streams[0];
        let code = cuMemcpyHtoDAsync_v2(program.memory, pageable as *const _, SIZE, stream);
        assert_eq!(code, INVALID_VALUE);
    });
    assert_found("not pinned", |program| {
        let stream = program.streams[0];
        let code = cuMemcpyDtoHAsync_v2(pageable as *mut _, program.memory, SIZE, stream);
        assert_eq!(code, INVALID_VALUE);
    });
}

#[test]
fn pinned_memory_that_changes_or_is_freed_under_a_copy_is_found() {
    for upload in [true, false] {
        let (mut changes, mut frees) = (0, 0);
        for seed in 0..50 {
            let program = Program::new(seed);
            ok(if upload { program.upload(0) } else { program.download(0) });
            // SAFETY: the pinned memory has as many bytes.
            unsafe { program.pinned.cast::<u8>().add(777).write(1) };
            ok(cuCtxSynchronize());
            changes += program.faults().iter().filter(|of| of.contains("memory changed")).count();
            ok(if upload { program.upload(0) } else { program.download(0) });
            cuMemFreeHost(program.pinned);
            frees += program.faults().iter().filter(|of| of.contains("memory freed")).count();
        }
        // Some copies were complete by chance.
        assert!(changes > 20 && frees > 20, "{changes} and {frees} of 50");
    }
}

#[test]
fn pinned_memory_that_is_used_again_without_waiting_is_found_whenever_the_copy_runs() {
    assert_found("race", |program| {
        ok(program.upload(0));
        while cuStreamQuery(program.streams[0]) != SUCCESS {}
        // Nothing tells the program about the second copy, even if it is complete.
        ok(program.upload(0));
        with_device(program.device, |device| device.finish_all()).unwrap().unwrap();
        // SAFETY: the pinned memory has as many bytes.
        unsafe { program.pinned.cast::<u8>().write(1) };
        ok(program.upload(0));
    });
}

#[test]
fn a_copy_that_is_not_waited_for_has_not_arrived() {
    let mut early = 0;
    for seed in 0..50 {
        let program = Program::new(seed);
        ok(program.upload(0));
        ok(cuCtxSynchronize());
        ok(program.download(0));
        // SAFETY: the pinned memory has as many words.
        early += usize::from(unsafe { program.pinned.cast::<u32>().read() } != 0);
        program.end();
    }
    assert!(early > 20, "{early} of 50");
}

#[test]
fn bad_handles_and_double_frees_are_found() {
    assert_found("double free", |program| {
        ok(cuMemFree_v2(program.memory));
        assert_eq!(cuMemFree_v2(program.memory), INVALID_VALUE);
    });
    assert_found("bad handle", |program| {
        ok(cuStreamDestroy_v2(program.streams[1]));
        assert_eq!(program.launch(1, program.memory), INVALID_HANDLE);
    });
    assert_found("bad handle", |_| assert_eq!(cuEventSynchronize(7), INVALID_HANDLE));
}

#[test]
fn what_is_not_freed_before_its_context_is_a_leak() {
    let program = Program::new(0);
    ok(cuMemFree_v2(program.memory));
    ok(cuDevicePrimaryCtxRelease_v2(program.device as i32));
    let faults = program.faults();
    for what in ["stream", "module", "pinned memory 0"] {
        assert!(faults.iter().any(|of| of.contains("leak: ") && of.contains(what)), "{faults:?}");
    }
    assert_eq!(faults.len(), 4, "{faults:?}");
}

#[test]
fn allocations_beyond_the_capacity_fail_and_the_device_goes_on() {
    let program = Program::new(0);
    let mut memory = 0;
    // SAFETY: the pointer is to memory for the result.
    unsafe {
        assert_eq!(cuMemAllocAsync(&mut memory, 1 << 20, program.streams[0]), OUT_OF_MEMORY);
        ok(cuMemAllocAsync(&mut memory, (1 << 20) - SIZE, program.streams[0]));
        // A pending free makes room.
        ok(cuMemFreeAsync(memory, program.streams[0]));
        ok(cuMemAllocAsync(&mut memory, 1 << 19, program.streams[0]));
    }
    ok(cuMemFreeAsync(memory, program.streams[0]));
    program.end();
}

#[test]
fn a_sticky_error_fails_every_later_call_and_still_frees() {
    for code in [214, 700, 719, 999] {
        for is_late in [false, true] {
            let program = Program::new(code.into());
            // SAFETY: the name is a C string.
            unsafe { fake_cuda_fail(program.device, c"cuLaunchKernel".as_ptr(), 1, code, is_late) };
            ok(program.launch(0, program.memory));
            let second = program.launch(0, program.memory);
            assert!(second == code || is_late);
            assert_eq!(cuStreamSynchronize(program.streams[0]), code);
            assert_eq!(program.upload(0), code);
            assert_eq!(cuMemFree_v2(program.memory), code);
            assert_eq!(cuMemFreeHost(program.pinned), code);
            program.streams.iter().for_each(|stream| assert_eq!(cuStreamDestroy_v2(*stream), code));
            assert_eq!(cuModuleUnload(program.module), code);
            assert_eq!(with_device(program.device, |device| device.live()).unwrap().len(), 0);
        }
    }
}
