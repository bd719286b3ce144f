package egress_test

import (
	"testing"

	"github.com/spoolhq/spool/pkg/daemon/settingstest"
	"github.com/spoolhq/spool/services/executor/internal/egress"
)

func TestEverySettingIsTested(t *testing.T) {
	t.Parallel()
	settingstest.Covered(t, egress.Settings{}, map[string]string{
		"SPOOL_EGRESS_LISTEN_SANDBOXES": "TestCommand", "SPOOL_EGRESS_LISTEN_ADMIN": "TestCommand", "SPOOL_EGRESS_DATA": "TestSockets", "SPOOL_EGRESS_LISTEN_METRICS": "TestSockets",
		"SPOOL_EGRESS_LISTEN_TLS": "TestTLSCertificateIsReplaced", "SPOOL_EGRESS_TLS_CERTIFICATE": "TestTLSCertificateIsReplaced", "SPOOL_EGRESS_TLS_KEY": "TestTLSCertificateIsReplaced",
		"SPOOL_EGRESS_TLS_CONNECTIONS": "TestTLSConnectionsAreBounded", "SPOOL_EGRESS_TLS_ADDRESS_CONNECTIONS": "TestAttack_EgressTLS_ThousandsOfSilentConnections", "SPOOL_EGRESS_TLS_HANDSHAKE": "TestAttack_EgressTLS_SlowHandshakesAreCut",
		"ANTHROPIC_API_KEY": "TestModelRoutes", "SPOOL_ANTHROPIC_BASE_URL": "TestModelRoutes", "OPENAI_API_KEY": "TestModelRoutes", "SPOOL_OPENAI_BASE_URL": "TestModelRoutes",
		"NVIDIA_API_KEY": "TestModelRoutes", "SPOOL_NVIDIA_BASE_URL": "TestModelRoutes", "SPOOL_EGRESS_ALL_PATHS": "TestOnlyModelsAreServed",
		"SPOOL_EGRESS_HOSTS": "TestHosts", "SPOOL_EGRESS_PRICES": "TestHosts", "SPOOL_EGRESS_CLOSED": "TestClosed", "SPOOL_EGRESS_OPEN": "TestServers", "SPOOL_EGRESS_CONNECTIONS": "TestConnections_AreLimitedPerSandbox",
		"SPOOL_EGRESS_IDLE": "TestIdle_ConnectionsAreClosed", "SPOOL_EGRESS_MODEL_IDLE": "TestSilentModel_RequestTimesOut", "SPOOL_EGRESS_JOURNAL_MAX": "TestFullJournal_RefusesModelCalls", "SPOOL_EGRESS_KEEP_FOR": "TestKeepFor",
		"SPOOL_EGRESS_DRAIN": "TestDrain_IsBoundedByTimeAndSecondSignal", "SPOOL_LOG_LEVEL": "TestCommand",
	})
}
