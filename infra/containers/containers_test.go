package containers

import (
	"context"
	"os"
	"testing"
	"time"

	"mailproof/infra/guardian"
	"mailproof/infra/infratest"
)

func TestMain(m *testing.M) {
	guardian.MaybeRun()
	os.Exit(m.Run())
}

// Needs a container engine and images that are there or can be pulled: a machine
// without one says so and runs the same suite against plain processes.
func TestConformance(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := Available(ctx); err != nil {
		t.Skipf("no container engine answers: %v", err)
	}
	infratest.Run(t, New(DefaultImages()), infratest.Features{Signals: true, Guards: true, KafkaKind: "apache"})
}
