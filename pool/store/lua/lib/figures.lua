-- What is counted of a rank's Programs beside its book: windows of samples, and histograms for /metrics.

-- Upper bounds of the histograms by unit; pool/store/program_figures.py has the same.
local UPPER = {
  ms = {0, 50, 100, 500, 1000, 2000, 5000, 10000, 30000, 60000, 300000, 600000},
  tokens = {0, 100, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000},
}

-- One more value of a figure, whose name ends with its unit; the value.
local function measured(at, name, value)
  local within = 'inf'
  for _, bound in ipairs(UPPER[string.match(name, '(%a+)$')]) do
    if value <= bound then
      within = bound
      break
    end
  end
  redis.call('HINCRBY', at.figures, name .. ':' .. within, 1)
  redis.call('HINCRBY', at.figures, name .. ':sum', string.format('%.0f', value))
  return value
end

-- One more sample of a window of `size`.
local function sampled(window, packed, size)
  redis.call('RPUSH', window, packed)
  redis.call('LTRIM', window, -size, -1)
end
