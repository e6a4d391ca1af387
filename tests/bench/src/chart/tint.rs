//! The colour of each transport and system, which is the same in all panels.

use plotters::style::RGBColor;

/// What a bar shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tint {
    /// ZeroShard over shared memory.
    SharedMemory,
    /// ZeroShard over gRPC.
    Grpc,
    /// The loops and kernels of ZeroShard, with f32 state.
    Wide,
    /// The same, with 8-bit state.
    Narrow,
    /// No synchronisation.
    Local,
    Ddp,
    Zero1,
    Fsdp2,
    DeepSpeed,
    Other,
}

impl Tint {
    /// Of ZeroShard over this transport.
    pub(super) fn of_transport(name: &str) -> Self {
        match name {
            "shm" => Self::SharedMemory,
            "grpc" => Self::Grpc,
            _ => Self::Other,
        }
    }

    /// Of another system than ZeroShard.
    pub(super) fn of_peer(system: &str) -> Self {
        match system {
            "local" => Self::Local,
            "ddp" => Self::Ddp,
            "zero1" => Self::Zero1,
            "fsdp2" => Self::Fsdp2,
            "ds1" | "ds2" | "ds3" => Self::DeepSpeed,
            _ => Self::Other,
        }
    }

    /// Blue is ZeroShard's training, teal its arithmetic; the other systems of torch are grey or
    /// amber. The colours differ in lightness, for readers who do not see all hues.
    pub(super) fn rgb(self) -> RGBColor {
        match self {
            Self::SharedMemory => RGBColor(23, 84, 158),
            Self::Grpc => RGBColor(110, 172, 224),
            Self::Wide => RGBColor(20, 122, 110),
            Self::Narrow => RGBColor(122, 200, 187),
            Self::Local => RGBColor(205, 208, 212),
            Self::Ddp => RGBColor(92, 99, 107),
            Self::Zero1 => RGBColor(148, 155, 163),
            Self::Fsdp2 => RGBColor(222, 151, 46),
            Self::DeepSpeed => RGBColor(143, 111, 178),
            Self::Other => RGBColor(176, 137, 120),
        }
    }
}
