//! Generates requests that need consistent fields, in addition to valid values, to be accepted.

use std::sync::atomic::Ordering;

use prost_reflect::{DynamicMessage, MessageDescriptor};
use zeroshard_proto::pb::{self, push_begin::Contents, serve_request::Event};
use zeroshard_tests::stock;

use crate::{facts::Slice, generate::Generator, jobs::slices_of_bystander, schema::Rpc};

impl Generator<'_> {
    /// Generates the messages of a call to the server with this number.
    pub(crate) fn messages(&mut self, rpc: &Rpc, server: usize) -> Vec<DynamicMessage> {
        let of = rpc.method.input();
        match rpc.method.full_name() {
            "zeroshard.v1.DataService.Push" if self.chance(85) => self.push(&of, server),
            "zeroshard.v1.DataService.Pull" if self.chance(60) => self.pull(&of, server),
            "zeroshard.v1.ShardService.Changes" if self.chance(60) => self.changes(&of, server),
            "zeroshard.v1.ShardService.Capture" if self.chance(85) => self.capture(&of),
            "zeroshard.v1.MirrorService.Changes" if self.chance(85) => self.mirror_changes(&of),
            "zeroshard.v1.MirrorService.Copy" if self.chance(85) => self.mirror_copy(&of),
            "zeroshard.v1.CoordinatorService.Commit" if self.chance(60) => self.commit(&of),
            "zeroshard.v1.CoordinatorService.Serve" if self.chance(85) => self.serve(&of),
            "zeroshard.v1.WorkerService.Deliver" if self.chance(60) => self.deliver(&of),
            _ if rpc.method.is_client_streaming() => {
                (0..self.random.usize(..5)).map(|_| self.message(&of, 0)).collect()
            }
            _ => vec![self.message(&of, 0)],
        }
    }

    fn push(&mut self, of: &MessageDescriptor, server: usize) -> Vec<DynamicMessage> {
        let (step, attempt) = (self.member.version, self.member.attempt);
        let contents = match self.random.u32(..10) {
            0 => Contents::Upload(pb::Upload::default()),
            1 => Contents::Replacement(pb::Replacement { step, attempt }),
            _ => Contents::Gradients(pb::Gradients { step, attempt, ..Default::default() }),
        };
        let begin = pb::PushBegin {
            job: self.member.job.clone(),
            job_id: self.member.job_id,
            rank: self.member.rank,
            lease: self.member.lease,
            epoch: self.member.epoch,
            covers: Vec::new(),
            contents: Some(contents),
            window: 0,
        };
        let mut messages = vec![stock::open(begin)];
        for Slice { index, numel, trains, shard, .. } in self.member.slices.clone() {
            if trains && shard == server {
                messages.push(stock::extent(index, 0, &vec![0.5; numel]));
            }
        }
        messages.iter().map(|message| dynamic(of, message)).collect()
    }

    fn pull(&mut self, of: &MessageDescriptor, server: usize) -> Vec<DynamicMessage> {
        let here = self.member.slices.iter().filter(|slice| slice.shard == server);
        let slices: Vec<u32> = here.map(|slice| slice.index).collect();
        vec![dynamic(of, &stock::read(&self.member.job, self.member.version, slices))]
    }

    /// Generates a request of a reader, which has a box of each second tensor.
    fn changes(&mut self, of: &MessageDescriptor, server: usize) -> Vec<DynamicMessage> {
        let here = self.member.slices.iter().filter(|slice| slice.shard == server);
        let here: Vec<Slice> = here.copied().collect();
        let mut boxes = Vec::<pb::Box>::new();
        for tensor in here.iter().map(|slice| slice.tensor) {
            if boxes.last().is_none_or(|last| last.tensor != tensor as u32) && self.chance(50) {
                let dims = self.member.shapes[tensor].iter().map(|&all| {
                    let size = self.random.u64(1..=all);
                    pb::BoxDim { offset: self.random.u64(..=all - size), size }
                });
                boxes.push(pb::Box { tensor: tensor as u32, dims: dims.collect() });
            }
        }
        let slices = here.iter().map(|slice| slice.index).collect();
        let slices = pb::FollowedSlices { dtype: pb::Dtype::F32.into(), slices, boxes };
        let request = pb::ChangesRequest {
            job: self.member.job.clone(),
            job_id: self.member.job_id,
            slices: vec![slices],
            from: self.chance(50).then_some(self.member.version),
            wait_ms: self.random.u32(..100),
            ..Default::default()
        };
        vec![dynamic(of, &request)]
    }

    /// Generates the capture of the step after the next one: the next one may have begun.
    fn capture(&mut self, of: &MessageDescriptor) -> Vec<DynamicMessage> {
        let (job, job_id) = (self.member.job.clone(), self.member.job_id);
        let step = self.member.version + 1;
        vec![dynamic(of, &pb::CaptureRequest { job, job_id, step, ..Default::default() })]
    }

    /// Generates a request for the changes since one of the last versions.
    fn mirror_changes(&mut self, of: &MessageDescriptor) -> Vec<DynamicMessage> {
        let version = self.facts.version.load(Ordering::Relaxed);
        let from = version.saturating_sub(self.random.u64(..20));
        let request = pb::ChangesRequest {
            job: self.member.job.clone(),
            job_id: self.member.job_id,
            slices: self.followed(),
            from: self.chance(90).then_some(from),
            to: self.chance(30).then_some(version),
            wait_ms: self.random.u32(1..300),
            ..Default::default()
        };
        vec![dynamic(of, &request)]
    }

    fn mirror_copy(&mut self, of: &MessageDescriptor) -> Vec<DynamicMessage> {
        let (job, job_id) = (self.member.job.clone(), self.member.job_id);
        let slices = self.followed();
        vec![dynamic(of, &pb::CopyRequest { job, job_id, slices, ..Default::default() })]
    }

    /// Some slices of the job that the mirror follows.
    fn followed(&mut self) -> Vec<pb::FollowedSlices> {
        let slices = (0..slices_of_bystander()).filter(|_| self.chance(70)).collect();
        vec![pb::FollowedSlices { dtype: pb::Dtype::F32.into(), slices, boxes: Vec::new() }]
    }

    fn commit(&mut self, of: &MessageDescriptor) -> Vec<DynamicMessage> {
        let turn = Some(self.turn());
        let loss = self.chance(50).then_some(0.5);
        vec![dynamic(of, &pb::CommitRequest { turn, loss, ..Default::default() })]
    }

    fn turn(&self) -> pb::Turn {
        pb::Turn {
            job: self.member.job.clone(),
            job_id: self.member.job_id,
            lease: self.member.lease,
            epoch: self.member.epoch,
            rank: self.member.rank,
            step: self.member.version,
            attempt: self.member.attempt,
        }
    }

    /// Generates the registration of a server. In most cases the server has no room for a job,
    /// because jobs on it do not start.
    fn serve(&mut self, of: &MessageDescriptor) -> Vec<DynamicMessage> {
        let bytes = if self.chance(90) { 0 } else { 1 << 20 };
        let hello = pb::Hello {
            address: "127.0.0.1:9".to_owned(),
            server_id: self.random.u64(1..),
            incarnation: self.random.u64(1..),
            capacity: Some(pb::Capacity { bytes, memory_bytes: bytes }),
            job_reports: 0,
            ..Default::default()
        };
        let hello = pb::ServeRequest { event: Some(Event::Hello(hello)) };
        let mut messages = vec![dynamic(of, &hello)];
        messages.extend((0..self.random.usize(..4)).map(|_| self.message(of, 0)));
        messages
    }

    fn deliver(&mut self, of: &MessageDescriptor) -> Vec<DynamicMessage> {
        let header = pb::DeliverHeader {
            from: 1,
            group: vec![0, 1],
            pair: self.random.bool(),
            sequence: self.random.u64(..3),
            round: self.random.u32(..3),
            operation: "all_reduce".to_owned(),
            elements: 2,
            over_nccl: false,
            communicator: self.random.u32(..2),
        };
        let first = pb::DeliverRequest { header: Some(header), payload: vec![0; 4].into() };
        let second = pb::DeliverRequest { header: None, payload: vec![0; 4].into() };
        [first, second].iter().map(|message| dynamic(of, message)).collect()
    }
}

fn dynamic<M: prost::Message>(of: &MessageDescriptor, message: &M) -> DynamicMessage {
    let mut dynamic = DynamicMessage::new(of.clone());
    dynamic.transcode_from(message).unwrap();
    dynamic
}
