-- A job's input blocks (pool/store/inputs.py). `listed`: their ids in the record, false for a small input; `blocks`: the
-- keys that the caller declared.

-- The reply that names a job's blocks when the caller has not declared them, which it can only once it knows them.
local function undeclared(listed, blocks)
  if not listed then return nil end
  local count = 0
  for id in string.gmatch(listed, '%S+') do
    count = count + 1
    if string.sub(blocks[count] or '', -#id) ~= id then return {'blocks', listed} end
  end
end

-- An ended job lets go of its blocks. Those of its input stay until `until_ms`, a little longer than its record;
-- 0: they need not.
local function release(job, token, listed, blocks, until_ms)
  local of_prompt, at_ms = tonumber(redis.call('HGET', job, 'prompt_blocks')), now_ms()
  local end_ms = until_ms > 0 and kept_end(until_ms, at_ms) or 0
  for i, block in ipairs(blocks) do
    local keep_ms = tonumber(redis.call('HGET', block, 'until_ms'))
    if keep_ms then
      if i > of_prompt and until_ms > 0 then
        count_kept(block, end_ms, 1, at_ms)
        keep_ms = math.max(keep_ms, until_ms)
      end
      redis.call('HDEL', block, token)
      settle(block, keep_ms)
    end
  end
  local ids = {}
  for id in string.gmatch(listed, '%S+') do ids[#ids + 1] = id end
  local left = table.concat(ids, ' ', of_prompt + 1)
  redis.call('HSET', job, 'blocks', left, 'prompt_blocks', 0, 'kept_ms', end_ms)
end
