package scenarios

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"mailproof/history"
)

func TestCPUTimeOfAProcessRises(t *testing.T) {
	before, err := cpuTime(os.Getpid())
	require.NoError(t, err)
	after := before
	for sink, end := 0, time.Now().Add(5*time.Second); after < before+5*clockTick && time.Now().Before(end); sink++ {
		after, err = cpuTime(os.Getpid())
		require.NoError(t, err)
	}
	require.GreaterOrEqual(t, after, before+5*clockTick)
	require.Positive(t, peakMemory(os.Getpid()))
}

func TestCPUTimeOfNoProcessIsAnError(t *testing.T) {
	_, err := cpuTime(1 << 30)
	require.Error(t, err)
}

func TestCPUPercentAddsUpTheProcessesOfOneService(t *testing.T) {
	usage := map[string]history.Usage{
		"notifyd-1": {CPUSeconds: 1, WallSeconds: 10},
		"notifyd-2": {CPUSeconds: 2, WallSeconds: 10},
		"bookingd":  {CPUSeconds: 9, WallSeconds: 10},
	}
	require.InDelta(t, 30, cpuPercent(usage, "notifyd"), 0.01)
	require.Zero(t, cpuPercent(nil, "notifyd"))
}
