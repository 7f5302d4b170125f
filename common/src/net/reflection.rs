//! gRPC reflection, in both versions that tools speak: the services that a role serves, every message of ours, and the typed
//! details of errors, so that a tool can print those too.
use prost::Message;
use prost_types::FileDescriptorSet;
use tonic::service::Routes;
use tonic_reflection::server::{Builder, Error};

/// Adds reflection to `routes`. The descriptors describe both roles; only `services` and health are listed.
///
/// # Errors
/// When the descriptors cannot be read: a mistake of the build.
pub fn add_reflection(routes: Routes, services: &[&str]) -> Result<Routes, Error> {
    let mut details = FileDescriptorSet::decode(tonic_types::pb::FILE_DESCRIPTOR_SET)?;
    // google.rpc.Status is in proto/ under its own path.
    details.file.retain(|file| !file.name().ends_with("status.proto"));
    let builder = || {
        let builder = Builder::configure()
            .register_encoded_file_descriptor_set(crate::proto::DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .register_file_descriptor_set(details.clone())
            .with_service_name("grpc.health.v1.Health");
        services.iter().fold(builder, |builder, name| builder.with_service_name(*name))
    };
    Ok(routes.add_service(builder().build_v1()?).add_service(builder().build_v1alpha()?))
}
