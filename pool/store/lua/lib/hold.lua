-- A new job takes hold of its input blocks, writing those that are not there; or the reply that names those that are
-- missing and whose content was not sent, with nothing changed.
local function hold(token, blocks, data)
  local missing = {'missing'}
  for i, block in ipairs(blocks) do
    if data[i] == '' and redis.call('HEXISTS', block, 'data') == 0 then missing[#missing + 1] = i end
  end
  if #missing > 1 then return missing end
  for i, block in ipairs(blocks) do
    if redis.call('HEXISTS', block, 'data') == 0 then
      redis.call('HSET', block, 'data', data[i], 'until_ms', 0, 'kept', '')
    end
    redis.call('HSET', block, token, '')
    redis.call('PERSIST', block)
  end
end
