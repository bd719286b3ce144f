package metrics

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// certificate shows the certificate of the listeners, once there is one.
type certificate struct {
	expiry, failed *prometheus.Desc
	source         atomic.Pointer[func() (notAfter time.Time, err error)]
}

func newCertificate() *certificate {
	return &certificate{
		expiry: prometheus.NewDesc("spool_gateway_certificate_expiry_seconds", "Seconds until the certificate of tls-cert expires; negative once it has.", nil, nil),
		failed: prometheus.NewDesc("spool_gateway_certificate_reload_failed", "1 while tls-cert or tls-key have changed and cannot be used: the former certificate is served.", nil, nil),
	}
}

// Certificate shows the certificate of the listeners: when it expires, and an error while changed files cannot be used.
func (m *Metrics) Certificate(source func() (notAfter time.Time, err error)) {
	m.certificate.source.Store(&source)
}

// Describe sends the descriptions of the two metrics.
func (c *certificate) Describe(to chan<- *prometheus.Desc) {
	to <- c.expiry
	to <- c.failed
}

// Collect sends the two metrics, none without a certificate.
func (c *certificate) Collect(to chan<- prometheus.Metric) {
	source := c.source.Load()
	if source == nil {
		return
	}
	notAfter, err := (*source)()
	failed := 0.
	if err != nil {
		failed = 1
	}
	to <- prometheus.MustNewConstMetric(c.expiry, prometheus.GaugeValue, time.Until(notAfter).Seconds())
	to <- prometheus.MustNewConstMetric(c.failed, prometheus.GaugeValue, failed)
}
