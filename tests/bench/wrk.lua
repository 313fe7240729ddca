-- Cycles through the paths in a file. The last line of output is the measurement as JSON.
-- wrk ... --script wrk.lua -- PATHS [first number]; with it, a new number is added to each path, so none is repeated.
local paths, at, number = {}, 0, nil

function init(arguments)
   for line in io.lines(arguments[1]) do paths[#paths + 1] = line end
   number = tonumber(arguments[2])
end

function request()
   at = at + 1
   local path = paths[at % #paths + 1]
   if number then path = path .. "+" .. (number + at) end
   return wrk.format("GET", path)
end

function done(summary, latency)
   local errors = summary.errors
   print(string.format(
      '{"requests": %d, "seconds": %f, "bytes": %d, "p50_ms": %f, "p99_ms": %f, "errors": %d}',
      summary.requests, summary.duration / 1e6, summary.bytes, latency:percentile(50) / 1e3,
      latency:percentile(99) / 1e3, errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
