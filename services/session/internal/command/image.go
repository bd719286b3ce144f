package command

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/events"
)

// codeImageNotAllowed is the code for an image that is not in the operator's list. Executors use the same code.
const codeImageNotAllowed = "IMAGE_NOT_ALLOWED"

// isIsolated reports whether a provider's sandboxes are made from images and reach models only through the egress proxy.
func isIsolated(provider string) bool { return provider == "docker" || provider == "modal" }

// checkImage refuses a container image that the operator does not allow. An empty image means the installation's own
// image, which is allowed.
func (h *Handler) checkImage(field, image string) error {
	if image == "" {
		return nil
	}
	if err := h.cfg.Images.Check(image); err != nil {
		return &command.Error{Code: codeImageNotAllowed, Field: field, Detail: err.Error() + ": use another, or have the operator add it"}
	}
	return nil
}

// checkAgentImages refuses an agent with a container image that the operator does not allow. prefix is put before the
// name of the invalid field.
func (h *Handler) checkAgentImages(prefix string, agent events.AgentSpec) error {
	err := h.checkImage(prefix+"image", agent.Image)
	for i, m := range agent.MCPServers {
		err = errors.Join(err, h.checkImage(fmt.Sprintf("%smcpServers[%d].image", prefix, i), m.Image))
	}
	return err
}

// checkAppliedImages refuses an applied agent with container images that no session of this installation could use.
func (h *Handler) checkAppliedImages(agent events.AgentSpec) error {
	if !slices.ContainsFunc(h.cfg.Providers, isIsolated) {
		return nil
	}
	return h.checkAgentImages("spec.", agent)
}

// checkSessionImages refuses a session if its image, or the agent's image that it uses, or an image of the agent's MCP
// servers is not allowed. The agent may have been applied before the list of allowed images changed.
func (h *Handler) checkSessionImages(provider, image string, agent *events.AgentSpec) error {
	if !isIsolated(provider) {
		return nil
	}
	var of events.AgentSpec
	if agent != nil {
		of = *agent
	}
	of.Image = ""
	return errors.Join(h.checkImage("sessionOptions.image", image), h.checkAgentImages("agent.", of))
}
