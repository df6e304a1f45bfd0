package logging

import (
	"io"
	"log/slog"
	"testing"
)

// One line per mail: what it costs is a mail's cost.
func BenchmarkSentLine(b *testing.B) {
	log := New(io.Discard, slog.LevelInfo).With("instance", "1", "lane", "marketing")
	for b.Loop() {
		l := log.With(DedupeKey, "campaign:spring:89b54db17c6372f26e8ab55ba7246635", EventID, "campaign:spring:89b54db17c6372f26e8ab55ba7246635", Attempts, 1)
		l.With(ProviderID, "1426", "outcome", "accepted", "state", "SENT").Info("sent")
	}
}
